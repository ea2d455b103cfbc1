"""Requests to engines of a model with experts."""

PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(20 + 9 * shift)] for shift in range(5)]

FIRST = [[i * i % 97 for i in range(40)] + [n] for n in range(4)]
"""Prompts that share 40 tokens."""

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
