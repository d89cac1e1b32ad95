"""Rows of a file -> token ids, with a label of -100 on everything that is not to be learnt."""

from pathlib import Path

import datasets

KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
PAIRS = (("instruction", "output"), ("prompt", "completion"))


def load(data: str, held_out: str | None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The rows to train on and those held out: a tenth, if no file of them is given."""
    if held_out:
        return load_file(data), load_file(held_out)
    parts = load_file(data).train_test_split(0.1, seed=0)
    return parts["train"], parts["test"]


def load_file(path: str) -> datasets.Dataset:
    kind = KINDS.get(Path(path).suffix)
    if kind is None or not Path(path).is_file():
        raise SystemExit(f"{path}: not a file that ends in {', '.join(KINDS)}")
    datasets.disable_progress_bars()
    return datasets.load_dataset(kind, data_files=path, split="train")


def question_and_answer(row: dict) -> tuple[list[dict], str]:
    """The messages up to the answer that is to be learnt, none in plain text, and the answer."""
    if row.get("messages"):
        *question, answer = row["messages"]
        return question, answer["content"]
    for asked, answered in PAIRS:
        if asked in row and answered in row:
            return [{"role": "user", "content": row[asked]}], row[answered]
    if "text" in row:
        return [], row["text"]
    raise SystemExit(
        f"The data has the columns {', '.join(row)}. It needs `instruction` and `output`, or "
        "`prompt` and `completion`, or `messages`, or `text`."
    )


def prompt_text(question: list[dict], tokenizer) -> str:
    """What the model reads before it answers."""
    if not question:
        return ""
    if tokenizer.chat_template is None:
        return "".join(message["content"] + "\n" for message in question)
    return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)


def tokens(row: dict, tokenizer, max_length: int) -> dict[str, list[int]]:
    """Ids of question and answer, cut at `max_length`, and labels for the answer alone."""
    question, answer = question_and_answer(row)
    asked = tokenizer(prompt_text(question, tokenizer), add_special_tokens=False)["input_ids"]
    answered = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return {
        "input_ids": (asked + answered)[:max_length],
        "labels": ([-100] * len(asked) + answered)[:max_length],
    }


def tokenize(rows: datasets.Dataset, tokenizer, max_length: int) -> datasets.Dataset:
    """All rows as token ids, less those whose answer lies wholly beyond `max_length`."""
    ids = rows.map(
        tokens,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns=rows.column_names,
    )
    # The first token of a row is never predicted, so its label does not count.
    kept = ids.filter(lambda row: max(row["labels"][1:], default=-100) >= 0)
    if not len(kept):
        raise SystemExit(f"No row has anything to learn within --max-length {max_length} tokens.")
    return kept
