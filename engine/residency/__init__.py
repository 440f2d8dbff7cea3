"""Which experts are in which slots: tiers, how they fetch, and which expert gives way."""
