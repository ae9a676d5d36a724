from .tensors.jagged_tensor import JaggedTensor as JaggedTensor
from .tensors.keyed_jagged_tensor import KeyedJaggedTensor as KeyedJaggedTensor
from .tensors.keyed_tensor import KeyedTensor as KeyedTensor
from .tensors.regroup import multi_remap_to_groups as multi_remap_to_groups
from .tensors.regroup import permute_multi_embedding as permute_multi_embedding
from .tensors.variable_batch import VariableBatchKeyedJaggedTensor as VariableBatchKeyedJaggedTensor
