"""Fine-tune with Lightning, whose strategy runs DeepSpeed ZeRO-3, with AdaLomo.

    torchrun --nproc_per_node 2 examples/lightning_trainer.py

Not named lightning.py: Python would take it for the package. On a machine without a GPU, put
DS_ACCELERATOR=cpu before it.
"""

import torch
from tiny import GPU, options, rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

import ds_ext

try:
    import lightning
    from lightning.pytorch.strategies import DeepSpeedStrategy
except ImportError:
    raise SystemExit("This example needs Lightning: pip install lightning") from None

CONFIG = {"zero_optimization": {"stage": 3}}


class Finetuned(lightning.LightningModule):
    """A causal language model."""

    def __init__(self, folder: str, lr: float):
        super().__init__()
        self.folder, self.lr = folder, lr

    def configure_model(self):
        """Loads the model in parts: Lightning calls this within DeepSpeed's ``zero.Init``."""
        if not hasattr(self, "model"):
            partitioned = HfDeepSpeedConfig(CONFIG)  # while it lives, transformers knows of that
            self.model = AutoModelForCausalLM.from_pretrained(self.folder).train()
            del partitioned

    def configure_optimizers(self):
        """An object: Lightning does not look into a DeepSpeed config for an optimizer."""
        return ds_ext.AdaLomo(self.model.parameters(), lr=self.lr)

    def training_step(self, batch, _):
        """Its loss, which Lightning gives to engine.backward."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss


def main() -> None:
    given = options(__doc__, steps=30)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def collate(chosen):
        texts = [f"{row['instruction']} {row['output']}" for row in chosen]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}

    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=CONFIG),
        accelerator="gpu" if GPU else "cpu",
        devices=2,
        precision="bf16-true" if GPU else "32-true",
        max_steps=given.steps,
        log_every_n_steps=5,
        default_root_dir=given.out,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Finetuned(given.model, given.lr), DataLoader(rows(), 4, collate_fn=collate))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
