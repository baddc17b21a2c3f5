"""The pages of docs/studies, made from the results that are kept there and from nothing else."""

from __future__ import annotations

from pathlib import Path

from prooflens.evaluation.studies.base import Result
from prooflens.evaluation.studies.render import markdown, picture, read, summary

TITLES = {
    "synthetic": (
        "Synthetic encoders",
        """\
The paper's tables on its synthetic encoders. Ours have the same shape and task and were trained here, so their
weights are others. Q1: the most attended token stays. Q2: it keeps a mass of at least 1.2/S. Q3: the width of the
proved range of the row's entropy. A row counts every head, position and input.
""",
    ),
    "pretrained": (
        "Pretrained models",
        """\
The paper's tables on BERT-tiny and GPT-2. BERT-tiny is trained here on SST-2 (`prooflens train bert-tiny-sst2`);
mpnet (d = 768) and smollm2 (causal) stand in for GPT-2 where there is no hub. The method that the paper calls CPZ
beyond layer 0 samples its remainder: it is the engine `jacobian` here, and an estimate.
""",
    ),
    "probes": (
        "Probes and neighbourhoods",
        """\
Mechanisms that single inputs find, asked on a neighbourhood. 60 prompts with a name that occurs twice (three
templates, ten names, six places, five things), asked at its second occurrence, and as many with other words on which
what was chosen is asked again; 30 random sequences whose last token is the first again; three sets of five paraphrases;
nearest tokens of a vocabulary. "Looks at" says what the most attended token of the clean prompt is, and on how many
prompts. Q3 of the induction probe: the entropy stays within 0.1 nat of its clean value.
""",
    ),
    "pruning": (
        "Pruning",
        """\
What certificates say about which head to prune, on the induction encoder and over the paper's 20 seeds. Rules:
`certified` prunes the head that is proved stable most often (the paper's CPZ-guided), `responsive` the other,
`gradient` the one with the smaller gradient, `ablation` the one that costs the least accuracy, `entropy` the more
spread one. As a tool:

    prooflens prune toy-induction --eps 0.02 --rule certified --proof crown -o pruned/
""",
    ),
}
PREFACE = """\
*proved* is a proof for every point of the ball; *estimated* is what the paper's sampled method says and no proof;
*attack leaves standing* is what a search did not break, which no proof can exceed. Brackets are 95 % Clopper–Pearson
intervals, in per cent. The paper's figure is beside each, with its MC+PGD in brackets; its models have other weights,
or are other models, so that rates compare in kind. Seconds are of the wall clock, per input, one thread, on a shared
machine with two cores: upper ends. With `--device cuda` they are of one NVIDIA H200, and folders `carry/…` and `runs/…`
are slices of the models with their names (`benchmarks/slice_model.py`). *quick* results are of few inputs.
"""


def write_pages(folder: Path) -> list[Path]:
    """Pages, pictures and the summary from the results in `folder`/data."""
    results = read(folder / "data")
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    written = []
    for group, (title, about) in TITLES.items():
        held = [result for result in results if result.group == group]
        if not held:
            continue
        sections = [markdown(result, "pictures") for result in held]
        contents = [f"- [`{result.key}`](#{result.key}): {result.title}" for result in held]
        page = folder / f"{group}.md"
        text = "\n".join([f"# {title}", "", about, "", PREFACE, *contents, "", *sections])
        page.write_text(text.rstrip() + "\n", encoding="utf-8")
        written.append(page)
        for result in held:
            drawn = pictures / f"{result.key}.svg"
            drawn.write_text(picture(result), encoding="utf-8")
            written.append(drawn)
    index = folder / "index.md"
    index.write_text(_index(results), encoding="utf-8")
    return [*written, index]


def _index(results: list[Result]) -> str:
    pages = {result.key: f"{result.group}.md#{result.key}" for result in results}
    return "\n".join(
        [
            "# The paper's tables and figures",
            "",
            "    prooflens reproduce --list",
            "    prooflens reproduce all -o docs/studies      # --quick: few inputs, 5 minutes of one core",
            "    prooflens reproduce --pages docs/studies      # these pages, from the data",
            "    prooflens reproduce gpt2 --model gpt2         # the original, where a hub is at hand",
            "    prooflens reproduce wang_probe --layer 8 --engine taylor --device cuda --jobs 6 --samples 30",
            "",
            "A probe that fails (the last line) keeps what is answered in `answers/`, and the same command goes on "
            "from there. Each of several jobs has its share of the memory.",
            "",
            "One line per label of the paper: the first row that it has a figure for. All rows are on the pages of the "
            "studies, all numbers in `data/*.json`.",
            "",
            PREFACE,
            summary(results, pages),
        ]
    )
