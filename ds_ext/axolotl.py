"""Plugin for axolotl. ``plugins: [ds_ext.axolotl.Plugin]`` in a YAML registers the optimizers."""

from typing import Any

from axolotl.integrations.base import BasePlugin


class Plugin(BasePlugin):  # type: ignore[misc]  # axolotl is not installed where types are checked
    """Importing this module registers the optimizers of ds_ext with DeepSpeed."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Checks the YAML. axolotl calls it before it loads a model.

        Raises:
            ValueError: the YAML has no DeepSpeed config, which must name the optimizer.
        """
        if not cfg.get("deepspeed"):
            raise ValueError(
                "plugins: ds_ext.axolotl.Plugin makes optimizers known to DeepSpeed, but there is "
                'no "deepspeed:" here: add "deepspeed: ds.json", made by "python -m ds_ext config '
                'adalomo > ds.json", or remove the plugin.'
            )
