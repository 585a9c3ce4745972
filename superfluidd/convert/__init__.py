"""``superfluidd convert``: a GGUF file to a model directory that MLX serves.

* :mod:`.command`: the command: checks, a directory that appears whole or not at all.
* :mod:`.weights`: names, the order of rows, quantization; ``config.json``.
* :mod:`.tokenizer`: ``tokenizer.json`` and its companions, from the file's metadata.
"""
