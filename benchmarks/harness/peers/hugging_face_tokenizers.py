"""The ids of rendered texts, by the tokenizers library and nothing else.

Arguments: tokenizer.json, texts as JSON lines.
"""

from __future__ import annotations

import json
import sys

import tokenizers
from metering import Meter, tell

BATCH = 1000  # texts at once; all at once would need some 200 bytes a token


def main() -> None:
    whole = tokenizers.Tokenizer.from_file(sys.argv[1])
    with open(sys.argv[2], encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    meter, num_tokens = Meter(), 0
    for start in range(0, len(texts), BATCH):
        encodings = whole.encode_batch(texts[start : start + BATCH], add_special_tokens=False)
        num_tokens += sum(map(len, encodings))
    tell(meter.read(), version=tokenizers.__version__, tokens=num_tokens, rows=len(texts))


main()
