"""All rules of this package. Importing this module registers them."""

from ds_ext.rules.adafactor import Adafactor
from ds_ext.rules.adalomo import AdaLomo
from ds_ext.rules.adamw import AdamW
from ds_ext.rules.apollo import APOLLO, APOLLOMini
from ds_ext.rules.came import CAME
from ds_ext.rules.flashadamw import FlashAdamW
from ds_ext.rules.galore import GaLoreAdamW
from ds_ext.rules.lamb import LAMB
from ds_ext.rules.lion import Lion
from ds_ext.rules.lomo import LOMO
from ds_ext.rules.muon import Muon
from ds_ext.rules.scale import SCALE
from ds_ext.rules.sinkgd import SinkGD

__all__ = [
    "LOMO",
    "AdaLomo",
    "Adafactor",
    "AdamW",
    "CAME",
    "LAMB",
    "GaLoreAdamW",
    "SCALE",
    "SinkGD",
    "FlashAdamW",
    "Lion",
    "APOLLO",
    "APOLLOMini",
    "Muon",
]
