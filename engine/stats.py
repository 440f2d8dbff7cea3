"""One object says what a request did and cost: the CLI prints it, the panels read it, the benchmarks record it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """Statistics of the running or the last request. Times in seconds, sizes in bytes, rates per second.

    hit_rate: experts ready when asked / experts asked. `late` experts were in flight when asked (a prefetch that had
        started too late), `misses` were not even in flight; hits + late + misses = experts asked.
    computed_on_host: of the misses, those that the processor computed instead of waiting for their copy to the device.
    dropped: experts that were routed to and not computed: always 0.
    read_s: wall time during which at least one read was in flight; stall_s: time the computation waited for a read.
    hidden_io: 1 - stall_s / read_s, or None when nothing was read.
    prefetch: `gate` while the next layers' gates are looked up early, else `none`, now.
    routing: `router` when every layer routes itself, `prerouter` when heads route; lora: whether the recovery LoRA is on.
    forecast_agreement: in edge0 mode, mean share of a layer's forecast experts that its own router would have chosen too,
        looked up at some of the tokens; None elsewhere.
    draft_bits, draft_depth: in specter mode, bits of the draft, and draft tokens of the present window (0 is plain decoding);
        draft_parked: speculation did not pay, and the draft's memory went to the slots.
    accepted_per_window: [a] = windows of which exactly a draft tokens were accepted; acceptance_by_position: [i] = share of the
        draft tokens at position i, counted from 0, that were accepted, of those after accepted ones.
    forecast_recall: share of the experts that verification ran which the draft's routes had named.
    draft_s, verify_s: time spent drafting, and verifying, which includes its stall_s.
    peak_active_bytes: high-water mark of the ledger since the model was loaded; active_bytes_by_kind: now.
    rss_bytes: resident set of the whole process, interpreter and libraries included; None where unknown.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, found in the conversation's KV cache
    completion_tokens: int = 0
    ttft_s: float | None = None
    tok_s: float | None = None
    prefill_tok_s: float | None = None
    mode: str = "on-demand"
    prefetch: str = "none"
    expert_format: str = ""
    routing: str = "router"
    lora: bool = False
    hit_rate: float | None = None
    hits: int = 0
    late: int = 0
    misses: int = 0
    computed_on_host: int = 0
    dropped: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0
    hidden_io: float | None = None
    forecast_agreement: float | None = None
    draft_bits: int | None = None
    draft_depth: int | None = None
    draft_parked: bool = False
    accepted_per_window: tuple[int, ...] = ()
    acceptance_by_position: tuple[float, ...] = ()
    forecast_recall: float | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0
    expert_budget_bytes: int = 0
    peak_active_bytes: int = 0
    active_bytes_by_kind: dict[str, int] = field(default_factory=dict)
    rss_bytes: int | None = None
    device: str = "cpu"
    link: str = "ssd"  # what experts come over: `ssd`, `pcie`, or `emulated`
    pinned: bool | None = None  # on CUDA, whether the host's experts lie in pinned memory, from where copies are faster
    device_memory_bytes: int | None = None  # CUDA allocator, None on a machine without

    @property
    def mean_accepted(self) -> float | None:
        """Draft tokens accepted of a window, on average; None before one."""
        windows = sum(self.accepted_per_window)
        return sum(tokens * n for tokens, n in enumerate(self.accepted_per_window)) / windows if windows else None

    def as_dict(self) -> dict:
        return asdict(self)
