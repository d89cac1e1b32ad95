"""axolotl's plugin: ``plugins: [ds_ext.axolotl.Plugin]`` in its YAML makes the optimizers known."""

from typing import Any

from axolotl.integrations.base import BasePlugin


class Plugin(BasePlugin):  # type: ignore[misc]  # axolotl is not installed where types are checked
    """Makes the optimizers of ds_ext known to DeepSpeed, by the import of this module."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Called by axolotl with its YAML, before a model is loaded.

        Raises:
            ValueError: it names no DeepSpeed config, whose section "optimizer" would say which.
        """
        if not cfg.get("deepspeed"):
            raise ValueError(
                "plugins: ds_ext.axolotl.Plugin makes optimizers known to DeepSpeed, but there is "
                'no "deepspeed:" here: add "deepspeed: ds.json", made by "python -m ds_ext config '
                'adalomo > ds.json", or remove the plugin.'
            )
