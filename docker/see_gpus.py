"""Print how many GPUs CUDA sees, without TensorFlow, which takes longer to start and reports less about the cause.

`doctor` runs it in the training image.
"""

import ctypes
import json

count = ctypes.c_int()
cuda, *_ = [ctypes.CDLL(name) for name in ("libcudart.so.12", "libcudnn.so.9", "libnccl.so.2")]
cuda.cudaGetErrorString.restype = ctypes.c_char_p
code = cuda.cudaGetDeviceCount(ctypes.byref(count))
print(json.dumps({"count": count.value, "error": cuda.cudaGetErrorString(code).decode() if code else ""}))
