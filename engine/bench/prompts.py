"""Prompts of five kinds, for benchmarks whose figures depend on what is talked about."""

from __future__ import annotations

# (kind, prompt); neighbours are of different kinds, so that few repeats see several.
PROMPTS = (
    ("story", "Tell me a short story about a fox and a lighthouse."),
    ("facts", "What is the capital of France, and what is it known for?"),
    ("code", "Write a Python function that reverses a list, and explain it."),
    ("e-mail", "Write an e-mail to my boss asking for a day off next week."),
    ("maths", "A shop sells pens at 3 dollars each. How much do 12 pens cost? Explain step by step."),
    ("story", "Write a story about a girl who finds a map in an old book."),
    ("facts", "How do plants make their food?"),
    ("code", "Show me how to read a text file in Python line by line."),
    ("e-mail", "Write an e-mail that thanks a friend for her help with moving."),
    ("maths", "What is 15 percent of 240? Show how you found it."),
)
