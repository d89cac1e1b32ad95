"""All rules of this package. Importing this module registers them."""

from ds_ext.rules.adafactor import Adafactor as Adafactor
from ds_ext.rules.adalomo import AdaLomo as AdaLomo
from ds_ext.rules.adamw import AdamW as AdamW
from ds_ext.rules.apollo import APOLLO as APOLLO
from ds_ext.rules.apollo import APOLLOMini as APOLLOMini
from ds_ext.rules.came import CAME as CAME
from ds_ext.rules.flashadamw import FlashAdamW as FlashAdamW
from ds_ext.rules.galore import GaLoreAdamW as GaLoreAdamW
from ds_ext.rules.lamb import LAMB as LAMB
from ds_ext.rules.lion import Lion as Lion
from ds_ext.rules.lomo import LOMO as LOMO
from ds_ext.rules.muon import Muon as Muon
from ds_ext.rules.scale import SCALE as SCALE
from ds_ext.rules.sinkgd import SinkGD as SinkGD
