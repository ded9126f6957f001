"""Data parallelism: what one process of `torchrun --nproc_per_node=N train.py ...` knows of the others.

Every rank holds the whole model and takes its slice of each global batch; gradients are averaged once a step. Alone,
without torchrun, a World has one rank and all of this does nothing.
"""

import os
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from data import UserError

PATIENCE = timedelta(minutes=30)  # how long a rank waits for another one, which may be preparing data or saving


class World:
    """This process, number `rank` of `size`. Rank 0 is the main one: it alone prints, logs, samples and saves."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0

    @contextmanager
    def same_on_every_rank(self):
        """Around work that fails everywhere or nowhere: the main rank alone says why."""
        try:
            yield
        except UserError:
            if self.is_main:
                raise
            sys.exit(1)

    @contextmanager
    def joined(self, device: torch.device):
        """Meet the other processes, and part at the end. Gives this one's device: with CUDA, a GPU of its own.

        Raises:
            UserError: fewer GPUs than processes, or another process died.
        """
        if self.size == 1:
            yield device
            return
        if device.type == "mps":
            raise UserError("several processes cannot share device=mps: use --device=cpu")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                raise UserError(f"process {device.index} has no GPU: there are {torch.cuda.device_count()}")
            torch.cuda.set_device(device)
        cuda = device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE, device_id=device if cuda else None)
        try:
            yield device
        except RuntimeError as error:
            if not _is_of_a_lost_peer(error):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"rank {self.rank} lost another process of the run, and stops: {reason}") from None
        finally:
            dist.destroy_process_group()

    def barrier(self):
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def average_gradients(self, model):
        """The model, with its gradients averaged over the ranks as a backward pass ends."""
        if self.size == 1:
            return model
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def no_averaging(self, model):
        """Around the micro-batches of a step before the last: only their sum is worth sending."""
        return nullcontext() if self.size == 1 else model.no_sync()

    def sum(self, tensor):
        """`tensor`, summed over all ranks in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


def _is_of_a_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because of another process. gloo has no exception type of its own."""
    signs = ("gloo", "Connection closed by peer", "Connection reset by peer", "TCPStore")
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in signs)
