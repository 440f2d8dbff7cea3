"""What fits (plan), what is used (ledger), and the arena of equal slots that experts are computed from."""
