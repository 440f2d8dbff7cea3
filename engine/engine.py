"""One engine holds one model and runs one generation at a time; settings change between generations without a
reload."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import psutil
import torch

from engine.config import EngineConfig, GenerationConfig, Mode
from engine.decode.governor import Governor, Window
from engine.decode.parking import Parking
from engine.decode.plain import Stopped, decode, forward, prefill
from engine.decode.reuse import Conversation
from engine.decode.sampling import Sampler
from engine.decode.speculative import Tally, speculate
from engine.decode.text import TextStream, template_opens_reasoning
from engine.errors import BusyError, ConfigError, PlanError
from engine.forecast.draft import DraftRoutes
from engine.forecast.gate import DemandForecast
from engine.forecast.law import RoutingLaw
from engine.kernels.formats import emulates_bf16
from engine.kernels.int4 import native_packing
from engine.memory.ledger import Ledger
from engine.memory.plan import Plan, available_memory, make_plan, prefill_chunk, resolve_device, scratch_bytes
from engine.model.draft import begin_drafting, end_drafting
from engine.model.linear import emulate_linears
from engine.model.loader import load_model
from engine.model.resident import quantise_linears
from engine.model.router import Routing
from engine.model.skeleton import load_config
from engine.model.vocabulary import end_ids, load_tokenizer, vocabulary_size
from engine.modes import Modes, adapter_bytes
from engine.registry import resolve
from engine.residency.build import build_tier
from engine.residency.tier import Tier
from engine.stats import EngineStats
from engine.store.layout import StoreInfo, read_info
from engine.store.repack import repack

_KV_EVERY = 32  # tokens between two measurements of the cache
_FORCED = 8  # drafts of the windows in which a reply is forced in specter mode with free depth


@dataclass(frozen=True)
class Chunk:
    """A piece of a reply. finish_reason is None until the last one: `stop` (end of reply), `length`, or `stopped`."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


@dataclass
class _Request:
    """Counters of one request; times from time.perf_counter()."""

    prompt: int
    began: float
    prefill_done: float | None = None
    reused: int = 0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    tally: Tally = field(default_factory=Tally)  # of speculation

    def spent(self) -> tuple[float, int]:
        """(seconds, tokens) of decoding after the first token."""
        return (self.last - self.first, self.tokens - 1) if self.tokens > 1 else (0.0, 0)


def plan(config: EngineConfig) -> Plan:
    """What `config` would use and whether it fits; nothing is loaded. Raises StoreError or ConfigError for bad
    names."""
    path = resolve(config.model)
    info = read_info(path)
    return make_plan(config.model, info, config, vocabulary_size(load_config(path)), adapter_bytes(path, config))


class Engine:
    """Loads a prepared store and generates from it. Use as a context manager or call `close`.

    Raises on construction: StoreError (no such or damaged store), PlanError (does not fit), ConfigError.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._path = resolve(config.model)
        self.info: StoreInfo = read_info(self._path)
        self._vocabulary = vocabulary_size(load_config(self._path))
        self.config = config
        self.plan = self._plan(config, None)
        self._device = resolve_device(config.device)
        if self._device.type == "cpu" and self.info.packing not in ("plain", native_packing()):
            self.info = repack(self._path, self.info, native_packing())
        self._ledger = Ledger()
        self.tokenizer = load_tokenizer(self._path)
        self._model, self._experts = load_model(self._path, self.info, self._device)
        if config.resident == "int4":
            quantise_linears(self._model)
        if emulates_bf16(self._device):
            emulate_linears(self._model)
        self._ledger.set("resident", sum(t.numel() * t.element_size() for t in _distinct_tensors(self._model)))
        self._modes = Modes(self._path, self.info, self._model, self._experts)
        self._conversation = Conversation(self._model.config, prefill_chunk(self.info))
        self._end_ids = end_ids(self._path, self._model, self.tokenizer)
        self._busy = threading.Lock()
        self._tier = None
        self._request = _Request(0, time.perf_counter())
        self._check_prefetch(config)
        self._become(config, self.plan)
        self._speculate_anew()

    # -- generating --------------------------------------------------------------------------------------------------

    def chat(
        self, messages: list[dict], generation: GenerationConfig, stop: threading.Event | None = None
    ) -> Iterator[Chunk]:
        """Stream the reply to `messages` (dicts of role and content) through the tokenizer's chat template."""
        yield from self.complete(self.encode_chat(messages), generation, stop)

    def complete(
        self, prompt: list[int], generation: GenerationConfig, stop: threading.Event | None = None
    ) -> Iterator[Chunk]:
        """Stream what follows the token ids `prompt`. Setting `stop`, or closing the generator, ends it within a token.

        Raises BusyError while another generation runs, ConfigError for a prompt that leaves no room in the context, and
        ReadError when an expert cannot be read.
        """
        if self._model is None:
            raise ConfigError("the engine is closed: load the model again")
        if not prompt:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        room = self.config.context - len(prompt)
        if room < 1:
            raise ConfigError(f"the prompt has {len(prompt)} tokens and the context is {self.config.context}: shorten the "
                              "conversation or load the model with a longer context")  # fmt: skip
        with self._alone("wait for it to end, or stop it"):
            try:
                self._park()
                yield from self._run(
                    list(prompt), generation, min(generation.max_tokens, room), stop or threading.Event()
                )
            finally:
                self._ledger.set("scratch", 0)

    def _run(
        self, prompt: list[int], generation: GenerationConfig, limit: int, stop: threading.Event
    ) -> Iterator[Chunk]:
        request = self._request = _Request(len(prompt), time.perf_counter())
        self._alike = True
        self._reset_counters()
        self._modes.forecast.reset()
        text = TextStream(self.tokenizer, generation.stop)
        whole = False  # whether the cache is known to be whole: an error inside a forward leaves some layers ahead
        try:
            logits, request.reused = self._prefill(prompt, stop)
            request.prefill_done = time.perf_counter()
            self._ledger.set("kv", self._conversation.bytes())
            sampler = Sampler(generation, self._device)
            with closing(self._decode(logits, sampler, list(prompt), limit, stop)) as tokens:
                for token in tokens:
                    request.last = time.perf_counter()
                    request.first = request.first or request.last
                    request.tokens += 1
                    reason = "stop" if token in self._end_ids else None
                    piece = "" if reason else text.push(token)
                    if text.stopped:
                        reason = "stop"
                    elif reason is None and request.tokens >= limit:
                        reason = "length"
                    elif reason is None and stop.is_set():
                        reason = "stopped"
                    if reason:
                        piece += text.finish()
                    whole = True
                    yield Chunk(piece, (token,), reason)
                    if reason:
                        return
                    whole = False
        except Stopped:
            whole = True
            yield Chunk(text.finish(), (), "stopped")
        finally:
            if not whole:
                self._conversation.forget()
            self._ledger.set("kv", self._conversation.bytes())

    def _prefill(self, prompt: list[int], stop: threading.Event) -> tuple[torch.Tensor, int]:
        return prefill(self._model, self._conversation, prompt, stop, self._on_forward, self._modes.forecast.fresh)

    def _decode(
        self, logits: torch.Tensor, sampler: Sampler, history: list[int], limit: int, stop: threading.Event
    ) -> Iterator[int]:
        """The tokens after the prompt, by the loop of the present mode."""
        common = self._model, self._conversation, logits, sampler, history
        drafter = self._modes.forecast
        if not isinstance(drafter, DraftRoutes):
            return decode(*common, self._on_forward)
        return speculate(*common, limit, stop, drafter, self._governor, self._on_window, self._on_forward)

    def _park(self) -> None:
        """Before a reply in specter mode with free depth: give the draft's memory to the slots, or back, if that is faster."""
        if self.config.mode is not Mode.SPECTER or not self._alike:
            return
        was, last = self.parking.parked, self._request
        parked = self.parking.decide(*last.spent() if was else self._governor.spent())
        if parked != was:
            try:
                new = self._plan(self.config, available_memory(self._device) + self._ledger.active, parked)
            except PlanError:  # memory became scarce since: a reply can still be made as things are
                self.parking.parked = was
                return
            self._become(self.config, new, parked)
            self.plan = new

    def _speculate_anew(self) -> None:
        """Forget what was measured in specter mode."""
        depth = self.config.depth
        total = len(self.info.layers) * self.info.experts
        self._governor = Governor(None if depth == "auto" else depth, total)
        self.parking = Parking(depth == "auto")
        self._alike = False  # whether the last reply was made as the engine is now configured

    def _on_window(self, window: Window) -> None:
        self._request.tally.add(window)
        self._governor.learn(window, self._modes.forecast.cost())

    def _on_forward(self, tokens: int, decoding: bool) -> None:
        self._modes.forecast.on_forward(decoding)
        self._ledger.set("scratch", scratch_bytes(self.info, tokens, self._vocabulary))
        if self._request.tokens % _KV_EVERY == 0:
            self._ledger.set("kv", self._conversation.bytes())

    def force(self, prompt: list[int], reply: list[int]) -> torch.Tensor:
        """The distribution of every token of `reply`, as if the engine had said it: logits [len(reply), V] float32 on the CPU.

        The first row comes from the prefill of `prompt`, each further one from decoding the token before it; in specter mode
        from the verification of a window of the set depth, or of _FORCED where the depth is free. Raises as `complete` does.
        """
        width = 1
        if self.config.mode is Mode.SPECTER:
            width += _FORCED if self.config.depth == "auto" else int(self.config.depth)
        with self._alone("wait for it to end, or stop it"):
            try:
                self._modes.forecast.reset()
                logits, _ = self._prefill(prompt, threading.Event())
                rows = list(logits.float().cpu())
                fed = reply[:-1]
                for start in range(0, len(fed), width):
                    piece = fed[start : start + width]
                    self._on_forward(len(piece), True)
                    rows += forward(self._model, self._conversation, piece, every=True).float().cpu()
                    self._conversation.append(piece, prefill=False)
            except BaseException:
                self._conversation.forget()
                raise
        return torch.stack(rows)

    def trace(
        self,
        ids: list[int],
        watch: Callable[[int, torch.Tensor, Routing], None],
        on_logits: Callable[[int, torch.Tensor], None] = lambda start, logits: None,
        drafting: bool = False,
    ) -> None:
        """Run `ids` by the model's own routers, apart from the conversation, in pieces; drafting: with the draft's experts.

        For each piece watch(layer, MoE input [n, H], routing) is told of every MoE layer in turn, then on_logits(position of
        the piece's first token, logits [n, V]).
        """
        with self._alone("wait for it to end, or stop it"):
            adapters = self._modes.leave()
            try:
                self._modes.trace(watch)
                if drafting:
                    begin_drafting(self._experts, self._modes.draft)
                conversation = Conversation(self._model.config, prefill_chunk(self.info))
                for piece in conversation.pieces(ids):
                    on_logits(len(conversation.ids), forward(self._model, conversation, piece, every=True))
                    conversation.append(piece, prefill=True)
            finally:
                end_drafting(self._experts)
                self._modes.leave()
                self._modes.enter(self.config, self._tier, adapters)

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """Token ids of `messages` ready for the assistant's reply. Raises ConfigError when the template refuses
        them."""
        plain = self.tokenizer.chat_template is None  # a template writes its special tokens itself
        return self.tokenizer.encode(self._render(messages), add_special_tokens=plain)

    def opens_reasoning(self, messages: list[dict]) -> bool:
        """Whether the chat template itself opens the reasoning, so that the reply starts inside it."""
        return template_opens_reasoning(self._render(messages))

    def _render(self, messages: list[dict]) -> str:
        if self.tokenizer.chat_template is None:  # a base model: plain text, turn by turn
            return "\n".join(message["content"] for message in messages)
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is a program of the checkpoint's and may raise anything
            raise ConfigError(f"the model's chat template refuses this conversation: {error}") from error

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def tier(self) -> Tier:
        """Where the experts are computed from, for benchmarks and tests; another one after settings changed."""
        return self._tier

    @property
    def forecast(self) -> DemandForecast:
        """Who foresees in the present mode, for benchmarks and tests; another one after settings changed."""
        return self._modes.forecast

    @property
    def governor(self) -> Governor:
        """Who chooses the depth in specter mode; a new one after settings changed."""
        return self._governor

    @property
    def supports_gate(self) -> bool:
        """Whether every MoE layer has a router that gate look-ahead can ask."""
        return self._modes.supports_gate

    def stats(self) -> EngineStats:
        """Statistics of the running or the last request; cheap, from any thread."""
        request, counters, meter = self._request, self._tier.counters, self._tier.fetcher.meter
        asked = counters.hits + counters.late + counters.misses
        read = meter.busy_now() - self._read_before
        decode_s = (request.last or 0) - (request.first or 0)
        prefilled, fresh = request.prefill_done, request.prompt - request.reused
        cuda = self._device.type == "cuda"
        return EngineStats(
            prompt_tokens=request.prompt,
            reused_tokens=request.reused,
            completion_tokens=request.tokens,
            ttft_s=request.first - request.began if request.first else None,
            tok_s=(request.tokens - 1) / decode_s if decode_s > 0 else None,
            prefill_tok_s=fresh / (prefilled - request.began) if prefilled and fresh else None,
            mode=self.config.mode.value,
            prefetch=getattr(self._modes.forecast, "prefetch", "none"),
            expert_format=self.info.expert_format,
            routing="prerouter" if self.config.mode is Mode.EDGE0 else "router",
            lora=self._modes.lora,
            hit_rate=counters.hits / asked if asked else None,
            hits=counters.hits,
            late=counters.late,
            misses=counters.misses,
            computed_on_host=counters.elsewhere,
            dropped=sum(experts.dropped for experts in self._experts),
            bytes_read=meter.bytes - self._bytes_before,
            read_s=read,
            stall_s=counters.stall_s,
            hidden_io=max(0.0, 1 - counters.stall_s / read) if read > 0 else None,
            forecast_agreement=getattr(self._modes.forecast, "agreement", None),
            **self._speculation(),
            expert_budget_bytes=self.plan.expert_budget_bytes,
            peak_active_bytes=self._ledger.peak,
            active_bytes_by_kind=self._ledger.by_kind(),
            rss_bytes=psutil.Process().memory_info().rss,
            device=str(self._device),
            link="pcie" if cuda else "ssd" if self.config.emulated_link is None else "emulated",
            pinned=self._tier.fetcher.host.arena.pinned if cuda else None,
            device_memory_bytes=torch.cuda.memory_allocated(self._device) if cuda else None,
        )

    def _speculation(self) -> dict:
        """The part of the statistics that specter mode alone has."""
        if self.config.mode is not Mode.SPECTER:
            return {}
        tally, drafter = self._request.tally, self._modes.forecast
        return {
            "draft_bits": self.config.draft_bits,
            "draft_depth": self._governor.now,
            "draft_parked": not isinstance(drafter, DraftRoutes),
            "accepted_per_window": tuple(tally.accepted),
            "acceptance_by_position": tally.by_position(),
            "forecast_recall": getattr(drafter, "recall", None),
            "draft_s": tally.draft_s,
            "verify_s": tally.verify_s,
        }

    def residency(self) -> np.ndarray:
        """uint8 [MoE layers, experts]: 0 absent, 1 resident, 2 in flight, 3 just hit, 4 just missed."""
        return self._tier.residency()

    # -- changing ----------------------------------------------------------------------------------------------------

    def routing_law(self) -> RoutingLaw:
        """The law by which this model's routers select. Raises ConfigError when it is none that a forecast can follow."""
        return self._modes.routing_law()

    def router_weight(self, layer: int) -> torch.Tensor:
        """The weight [E, H] of the router of MoE layer `layer`."""
        return self._modes.router(layer).weight

    def modes(self) -> dict[str, str | None]:
        """Mode -> None where this model can be run in it, else one sentence on why not and what to do."""
        return {mode.value: self._modes.hindrance(mode, self.config.draft_bits) for mode in Mode}

    def drafts(self) -> tuple[int, ...]:
        """Bits of the drafts that specter mode can be run with as the model is prepared."""
        return self._modes.drafts()

    def configure(
        self,
        *,
        expert_memory: str | int | None = None,
        prefetch: str | None = None,
        mode: Mode | None = None,
        lora: bool | None = None,
        depth: str | int | None = None,
        draft_bits: int | None = None,
    ) -> None:
        """Change settings without loading the model again.

        Raises BusyError while generating, PlanError if it cannot fit, ConfigError for a mode that this model has not.
        """
        changes = {"expert_memory": expert_memory, "prefetch": prefetch, "mode": mode, "lora": lora,
                   "depth": depth, "draft_bits": draft_bits}  # fmt: skip
        wanted = replace(self.config, **{k: v for k, v in changes.items() if v is not None})
        with self._alone("change settings when it has ended"):
            self._check_prefetch(wanted)
            new = self._plan(wanted, available_memory(self._device) + self._ledger.active)
            self._become(wanted, new)
            if _computing(wanted) != _computing(self.config):
                self._conversation.forget()  # its keys and values were computed another way
            self.config, self.plan = wanted, new
            self._speculate_anew()

    def reset(self) -> None:
        """Forget the conversation's KV cache."""
        with self._alone("reset when it has ended"):
            self._conversation.forget()
            self._ledger.set("kv", 0)

    def restart_peak(self) -> None:
        """Let peak active memory start from what is held now."""
        self._ledger.reset_peak()

    def settle(self) -> None:
        """Wait until no expert is on its way."""
        self._tier.settle()

    def close(self) -> None:
        """Free the model and the slots. The engine cannot be used afterwards."""
        if self._tier is not None:
            self._modes.leave()
            self._detach()
        self._model = None
        self._experts = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, way_out: str) -> Iterator[None]:
        """Nobody else uses the model meanwhile. Raises BusyError, which ends with `way_out`, while somebody does."""
        if not self._busy.acquire(blocking=False):
            raise BusyError(f"the engine is generating: {way_out}")
        try:
            yield
        finally:
            self._busy.release()

    def _attach(self, config: EngineConfig, plan: Plan) -> None:
        """Build the tier a plan asks for and let the experts compute from it."""
        self._tier, kernel, host = build_tier(self._path, self.info, plan, config, self._experts[0], self._device)
        for experts in self._experts:
            experts.attach(self._tier, kernel, host)
        self._ledger.set("experts", self._tier.arena.bytes)
        self._reset_counters()

    def _detach(self) -> None:
        for experts in self._experts:
            experts.detach()
        self._tier.close()
        self._tier = None
        self._ledger.set("experts", 0)

    def _check_prefetch(self, config: EngineConfig) -> None:
        """Raises ConfigError where gate look-ahead is asked for and cannot be."""
        if config.prefetch == "gate" and not self.supports_gate:
            raise ConfigError(f"{self.info.architecture} has no router to ask a layer ahead: choose prefetch none")

    def _plan(self, config: EngineConfig, available: int | None, parked: bool = False) -> Plan:
        """The plan of `config`, which fits. Raises PlanError."""
        adapters = adapter_bytes(self._path, config)
        return make_plan(config.model, self.info, config, self._vocabulary, adapters, available, parked).require_fit()

    def _become(self, config: EngineConfig, plan: Plan, parked: bool = False) -> None:
        """Leave the present mode for the one of `config`, with the slots of `plan`; unchanged if that cannot be had, and on
        demand if it turns out only while a draft is loaded."""
        extras = self._modes.load(config, parked)
        self._modes.leave()
        self._modes.release(extras)
        if self._tier is None or self._tier.arena.slots != plan.slots:
            if self._tier is not None:
                self._detach()
            self._attach(config, plan)
        try:
            self._modes.enter(config, self._tier, extras)
        except Exception:
            self.config = replace(config, mode=Mode.ON_DEMAND)
            self._modes.enter(self.config, self._tier, None)
            raise
        finally:
            self._ledger.set("adapters", self._modes.adapter_bytes)
            self._ledger.set("draft", self._modes.draft_bytes)

    def _reset_counters(self) -> None:
        self._tier.reset_counters()
        for experts in self._experts:
            experts.dropped = 0
        self._read_before = self._tier.fetcher.meter.busy_now()
        self._bytes_before = self._tier.fetcher.meter.bytes


def _computing(config: EngineConfig) -> tuple:
    """What decides how keys and values are computed; specter mode computes them as on-demand mode does."""
    return config.mode is Mode.EDGE0, config.mode is Mode.EDGE0 and config.lora


def _distinct_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once."""
    return list({t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}.values())
