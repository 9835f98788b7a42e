"""Operations equal to torch's, bit for bit, where torch has a finite value and slope, and finite everywhere else."""

from resilient_train.numerics.operations import substitute as substitute
from resilient_train.numerics.safe import acos as acos
from resilient_train.numerics.safe import asin as asin
from resilient_train.numerics.safe import atan2 as atan2
from resilient_train.numerics.safe import atanh as atanh
from resilient_train.numerics.safe import binary_cross_entropy as binary_cross_entropy
from resilient_train.numerics.safe import cosine_similarity as cosine_similarity
from resilient_train.numerics.safe import cross_entropy_of_probabilities as cross_entropy_of_probabilities
from resilient_train.numerics.safe import div as div
from resilient_train.numerics.safe import eps as eps
from resilient_train.numerics.safe import exp as exp
from resilient_train.numerics.safe import log as log
from resilient_train.numerics.safe import log1p as log1p
from resilient_train.numerics.safe import log2 as log2
from resilient_train.numerics.safe import log10 as log10
from resilient_train.numerics.safe import log_softmax as log_softmax
from resilient_train.numerics.safe import norm as norm
from resilient_train.numerics.safe import normalize as normalize
from resilient_train.numerics.safe import pow as pow
from resilient_train.numerics.safe import raise_eps as raise_eps
from resilient_train.numerics.safe import reciprocal as reciprocal
from resilient_train.numerics.safe import rsqrt as rsqrt
from resilient_train.numerics.safe import softmax as softmax
from resilient_train.numerics.safe import sqrt as sqrt
from resilient_train.numerics.safe import std as std
