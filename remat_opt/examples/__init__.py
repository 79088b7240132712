from remat_opt.examples.training import NETWORKS as NETWORKS
from remat_opt.examples.training import TrainingExample as TrainingExample
from remat_opt.examples.training import TrainState as TrainState
from remat_opt.examples.training import image_classifier as image_classifier
