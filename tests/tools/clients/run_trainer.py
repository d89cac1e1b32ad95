"""transformers' Trainer with BERT, T5 or ViT, as in docs/guides/hf-trainer.md.

The arguments are the model and the ZeRO stage: ``bert 3``.
"""

import sys

import tiny
import torch
import torch.distributed as dist
import transformers as hf

import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> tuple[hf.PreTrainedModel, list[dict]]:
    """A classifier, and texts whose class is their first token."""
    config = hf.BertConfig(**SIZES, vocab_size=32, intermediate_size=128, num_labels=4)
    tokens = torch.randint(32, (256, 16))
    rows = [{"input_ids": row, "labels": row[0] % 4} for row in tokens]
    return hf.BertForSequenceClassification(config), rows


def t5() -> tuple[hf.PreTrainedModel, list[dict]]:
    """A translator, and texts that repeat one token."""
    config = hf.T5Config(
        vocab_size=32, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, 32, (256, 1)).expand(-1, 8)
    return hf.T5ForConditionalGeneration(config), [{"input_ids": t, "labels": t} for t in tokens]


def vit() -> tuple[hf.PreTrainedModel, list[dict]]:
    """A classifier of images, and images whose class is their brightness."""
    config = hf.ViTConfig(**SIZES, intermediate_size=128, image_size=16, patch_size=4, num_labels=4)
    labels = torch.randint(4, (256,))
    images = torch.randn(256, 3, 16, 16) + labels[:, None, None, None]
    return hf.ViTForImageClassification(config), [
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, labels, strict=True)
    ]


torch.manual_seed(0)
stage = int(sys.argv[2])
model, rows = {"bert": bert, "t5": t5, "vit": vit}[sys.argv[1]]()
settings = hf.TrainingArguments(deepspeed=tiny.config(stage), **tiny.arguments())
trainer = hf.Trainer(model=model, args=settings, train_dataset=rows)
trainer.train()
tiny.finish(trainer, stage)
dist.destroy_process_group()
