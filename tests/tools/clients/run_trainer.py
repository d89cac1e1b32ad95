"""Trainers of transformers, TRL and sentence-transformers, as in docs/guides.

The arguments are what is trained and the ZeRO stage: ``bert 3``.
"""

import sys

import datasets
import sentence_transformers as st
import tiny
import torch
import torch.distributed as dist
import transformers as hf
import trl
from sentence_transformers import losses, models

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

KIND, STAGE = sys.argv[1], int(sys.argv[2])
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128}


def bert() -> hf.Trainer:
    """A classifier, and texts whose class is their first token."""
    config = hf.BertConfig(**SIZES, vocab_size=32, num_labels=4)
    tokens = torch.randint(32, (256, 16))
    rows = [{"input_ids": row, "labels": row[0] % 4} for row in tokens]
    return trainer(hf.BertForSequenceClassification(config), rows)


def t5() -> hf.Trainer:
    """A translator, and texts that repeat one token."""
    config = hf.T5Config(
        vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    rows = [{"input_ids": t, "labels": t} for t in torch.randint(1, 32, (256, 1)).expand(-1, 8)]
    return trainer(hf.T5ForConditionalGeneration(config), rows)


def vit() -> hf.Trainer:
    """A classifier of images, and images whose class is their brightness."""
    config = hf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=4)
    labels = torch.randint(4, (256,))
    images = torch.randn(256, 3, 16, 16) + labels[:, None, None, None]
    pairs = zip(images, labels, strict=True)
    rows = [{"pixel_values": image, "labels": label} for image, label in pairs]
    return trainer(hf.ViTForImageClassification(config), rows)


def trainer(model: hf.PreTrainedModel, rows: list[dict]) -> hf.Trainer:
    return hf.Trainer(model=model, args=hf.TrainingArguments(**SETTINGS), train_dataset=rows)


def sft() -> hf.Trainer:
    return of_trl(trl.SFTTrainer, trl.SFTConfig, tiny.rows())


def dpo() -> hf.Trainer:
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " I do not know."}
        for row in tiny.rows()
    ]
    return of_trl(trl.DPOTrainer, trl.DPOConfig, rows, ref_model=tiny.llama())


def of_trl(kind: type, settings: type, rows: list[dict], **more: object) -> hf.Trainer:
    data, args = datasets.Dataset.from_list(rows), settings(**SETTINGS)
    more |= {"train_dataset": data, "processing_class": tiny.tokenizer()}
    return kind(model=tiny.llama(), args=args, **more)


def sentences() -> hf.Trainer:
    args, tokenizer = st.SentenceTransformerTrainingArguments(**SETTINGS), tiny.tokenizer()
    config = hf.BertConfig(**SIZES, vocab_size=len(tokenizer))
    hf.BertModel(config).save_pretrained("bert")  # which the first rank writes
    tokenizer.save_pretrained("bert")
    dist.barrier()
    words = models.Transformer("bert", max_seq_length=64)
    model = st.SentenceTransformer(modules=[words, models.Pooling(64)], device="cpu")
    rows = [{"anchor": row["prompt"], "positive": row["completion"]} for row in tiny.rows()]
    loss, data = losses.MultipleNegativesRankingLoss(model), datasets.Dataset.from_list(rows)
    return st.SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)


torch.manual_seed(0)
SETTINGS = {"deepspeed": tiny.config(STAGE)} | tiny.arguments()
made = {"bert": bert, "t5": t5, "vit": vit, "sft": sft, "dpo": dpo}.get(KIND, sentences)()
made.train()
tiny.finish(made, STAGE)
dist.destroy_process_group()
