"""Memory passes that rules are built from. No rule is named here.

This package exports ``ops.apply_(...)`` and the other passes.
"""

from ds_ext.ops.batch import Batch as Batch
from ds_ext.ops.expressions import Gradient as Gradient
from ds_ext.ops.expressions import Quotient as Quotient
from ds_ext.ops.expressions import Readable as Readable
from ds_ext.ops.expressions import Run as Run
from ds_ext.ops.expressions import RunQuotient as RunQuotient
from ds_ext.ops.expressions import Scaled as Scaled
from ds_ext.ops.expressions import Sum as Sum
from ds_ext.ops.expressions import Writable as Writable
from ds_ext.ops.expressions import accumulator as accumulator
from ds_ext.ops.expressions import plus as plus
from ds_ext.ops.expressions import read as read
from ds_ext.ops.expressions import times as times
from ds_ext.ops.functions import apply_ as apply_
from ds_ext.ops.functions import blocks as blocks
from ds_ext.ops.functions import evaluate as evaluate
from ds_ext.ops.functions import factors_ as factors_
from ds_ext.ops.functions import lerp_ as lerp_
from ds_ext.ops.functions import normalize_columns as normalize_columns
from ds_ext.ops.functions import normalize_rows as normalize_rows
from ds_ext.ops.functions import normalize_whole_rows as normalize_whole_rows
from ds_ext.ops.functions import pad as pad
from ds_ext.ops.functions import row_col_square_sums as row_col_square_sums
from ds_ext.ops.functions import square_lerp_ as square_lerp_
from ds_ext.ops.functions import square_sum as square_sum
from ds_ext.ops.functions import square_sums as square_sums
from ds_ext.ops.functions import unit_quotient as unit_quotient
from ds_ext.ops.functions import weighted_square_sums as weighted_square_sums
from ds_ext.ops.moments import AdamStep as AdamStep
from ds_ext.ops.moments import Residual as Residual
from ds_ext.ops.moments import RootQuotient as RootQuotient
from ds_ext.ops.moments import SignStep as SignStep
from ds_ext.ops.moments import advance_ as advance_
from ds_ext.ops.products import PlacedProduct as PlacedProduct
from ds_ext.ops.products import Product as Product
from ds_ext.ops.products import operand_dtype as operand_dtype
from ds_ext.ops.products import terms_for as terms_for
from ds_ext.ops.runs import Runs as Runs
