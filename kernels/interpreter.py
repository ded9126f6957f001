"""Running the kernels without a GPU: `TRITON_INTERPRET=1`, set before this package is imported.

The interpreter executes a kernel with NumPy, program after program. It shows wrong algebra, masks and bounds, and does
so with a Python traceback; it knows nothing of races, registers or speed, and its bf16 is wrong without a word
(triton-lang/triton#11584): use fp32 or fp16.
"""

import triton

INTERPRETED = triton.knobs.runtime.interpret


def accept_numpy_2_4() -> None:
    """Let loop bounds be computed inside a kernel under NumPy 2.4 and Triton 3.6 (triton-lang/triton#9171).

    The interpreter keeps a scalar as an array of one element and hands that to `range`, which NumPy no longer turns
    into an int. Triton 3.7 has the same correction.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


if INTERPRETED:
    accept_numpy_2_4()
