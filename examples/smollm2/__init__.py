"""A llama-style model in plain JAX, enough to run SmolLM2-135M-Instruct from its GGUF file.

`fetch` finds the file, `weights` reads it, `tokenizer` turns text into ids, `model` is the network,
`session` feeds it a prompt whole, in chunks, or token by token; `../generate.py` joins them.
"""
