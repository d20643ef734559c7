import interpreter
import torch

torch.set_num_threads(1)
interpreter.switch_on()
