"""sentence-transformers' trainer with a tiny BERT at stage 2, as in docs/guides/hf-trainer.md."""

import tiny
import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

settings = SentenceTransformerTrainingArguments(deepspeed=tiny.config(2), **tiny.arguments())
torch.manual_seed(0)
tokenizer = tiny.tokenizer()
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
BertModel(config).save_pretrained("bert")  # which the first rank writes
tokenizer.save_pretrained("bert")
dist.barrier()
words = Transformer("bert", max_seq_length=64)
model = SentenceTransformer(modules=[words, Pooling(64)], device="cpu")
rows = [{"anchor": row["prompt"], "positive": row["completion"]} for row in tiny.rows()]
trainer = SentenceTransformerTrainer(
    model=model,
    args=settings,
    train_dataset=Dataset.from_list(rows),
    loss=MultipleNegativesRankingLoss(model),
)
trainer.train()
tiny.finish(trainer, stage=2)
dist.destroy_process_group()
