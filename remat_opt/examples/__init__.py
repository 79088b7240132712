"""Networks of the demo, the tests and the benchmarks, and the demo itself."""

from remat_opt.examples.registry import EXAMPLES as EXAMPLES
from remat_opt.examples.registry import NETWORKS as NETWORKS
from remat_opt.examples.registry import Example as Example
from remat_opt.examples.registry import Task as Task
from remat_opt.examples.registry import image_classifier as image_classifier
from remat_opt.examples.registry import make_example as make_example
from remat_opt.examples.training import TrainingExample as TrainingExample
from remat_opt.examples.training import TrainState as TrainState
