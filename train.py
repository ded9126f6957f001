"""Train a decoder on token shards:  python train.py config/small.py [--name=value ...] [--resume]

Straight down the page: settings, data, model, then the loop. One step is: set the learning rate, add up the gradients
of the micro-batches, clip, update. Nothing in the loop depends on how often it is interrupted, evaluated or sampled:
the data is a function of (seed, step), and so is the dropout.
"""

import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
from config import build, find_gpu, init_config, parse_command_line, pick_device, pick_dtype, resume_config, show
from data import UserError, exit_cleanly, open_datasets, parse_mixture, split_parts
from data.loader import Loader
from data.prepare import prepare_stdlib
from engine import Engine, Sampling
from evaluation import evaluate
from kernels import describe_backend, why_not_triton
from model import Transformer
from optim import learning_rate_at, make_optimizers, set_learning_rate
from parallel import World
from runlog import RunLog, plot_loss_curve, say, start_wandb

SAMPLE_TOKENS = 100
LINE_SECONDS = 10  # how often a log without a progress bar gets a line


def main(argv: list[str] | None = None):
    world = World()
    with world.same_on_every_rank():
        preset, overrides = parse_command_line(argv)
        config, saved, saved_at, notes = resolve_settings(preset, overrides)
        config.accumulation_steps(world.size)  # refuses what does not divide
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        check_attention(config, device, dtype)
    if world.is_main:
        for note in notes:
            say(note)
    if saved and saved["step"] >= config.max_steps:
        if world.is_main:
            say(f"nothing to do: all {config.max_steps} steps are done; a larger --max_steps would train on")
        return
    with world.joined(device) as device, memory_in_words(config):
        train(config, world, device, dtype, saved, saved_at)


def train(config, world, device, dtype, saved, saved_at):
    """The run, from `saved` (the state of the checkpoint directory `saved_at`) or from the start (None) to its end."""
    # ---- data -------------------------------------------------------------------------------------------------------
    dataset = open_training_data(config, world)
    if saved and saved["tokenizer"] != dataset.tokenizer.hash:
        raise UserError(f"dataset {config.dataset!r} has another tokenizer than the checkpoint {saved_at}")
    starts_from = None if saved else config.init_from
    if starts_from and checkpoint.load_tokenizer(starts_from).hash != dataset.tokenizer.hash:
        raise UserError(
            f"dataset {config.dataset!r} has another tokenizer than init_from={starts_from}: prepare it with that one, "
            f"python -m data.prepare files PATH... --tokenizer {starts_from}"
        )
    config = config.with_vocab_size(dataset.tokenizer.vocab_size)
    for val, _ in split_parts(dataset.val):
        if len(val) < 3:
            raise UserError(
                f"the validation text of dataset {config.dataset!r} has {len(val)} tokens: prepare more text"
            )
    if saved and saved.get("dataset") != dataset.hash and world.is_main:
        say(f"note: the text of dataset {config.dataset!r} is not what {saved_at} was trained on")
    block_size, windows_per_step = config.model.block_size, config.tokens_per_step // config.model.block_size
    loader = Loader(
        dataset.train,
        block_size,
        windows_per_step,
        config.seed,
        device,
        config.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        eot_id=dataset.tokenizer.eot_id if config.doc_mask else None,
    )

    # ---- model and optimizers ---------------------------------------------------------------------------------------
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.set_float32_matmul_precision("high")  # fp32 products on GPUs may use TF32; the CPU has no such thing
    model = Transformer(config.model, attention=None if config.attention == "auto" else config.attention, dtype=dtype)
    if starts_from:
        checkpoint.load_weights(checkpoint.resolve(starts_from), model)
    else:
        model.init_weights(torch.Generator().manual_seed(config.seed))
    model.to(device)
    optimizers = make_optimizers(model, config)
    if saved:
        checkpoint.load_weights(saved_at, model)
        checkpoint.load_optimizers(saved_at, model, optimizers)
    compiled = device.type == "cuda" if config.compile is None else config.compile
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model  # fullgraph: no breaks
    trained = world.average_gradients(forward)

    # ---- the run's directory and first words ------------------------------------------------------------------------
    step = saved["step"] if saved else 0
    run = Path(config.out_dir)
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    origin = {"versions": versions(), "commit": git_commit()}
    origin |= {"tokenizer": dataset.tokenizer.hash, "dataset": dataset.hash}
    log, wandb_id = None, saved["wandb"] if saved else None
    if world.is_main:
        wandb_run = start_wandb(run, config.flat(), wandb_id) if config.wandb else None
        history = saved_at.parent / "metrics.jsonl" if saved else None
        log = RunLog(run, {"config": config.flat(), **origin}, history, step)
        if wandb_run:
            log.wandb, wandb_id = wandb_run, wandb_run.id
        say(introduction(config, dataset, loader, world, device, dtype, compiled, gpu, origin))
        prompt = usable_prompt(config, dataset.tokenizer)

    # ---- the loop ---------------------------------------------------------------------------------------------------
    stop = StopOnSignal()
    clock = Clock(saved["seconds"] if saved else 0.0)
    best = saved["best_val_loss"] if saved else None
    hidden = None if world.is_main else True  # None: hidden where stderr is not a terminal
    bar = tqdm(total=config.max_steps, initial=step, desc=run.name, unit="step", dynamic_ncols=True, disable=hidden)
    flops_per_token = config.model.flops_per_token(block_size)
    in_flight = deque()  # steps whose numbers are still on their way from the device
    stopping = False

    while step < config.max_steps and not stopping:
        lr = learning_rate_at(step, config)
        began = moment(device)
        loss, grad_norm = update_weights(trained, optimizers, loader, step, lr, config, world)
        step += 1
        bar.update()
        in_flight.append(Update(step, lr, began, loss, grad_norm, stop.requested, world))
        evaluate_now = step % config.eval_interval == 0 or step == config.max_steps

        # A GPU is left one step ahead of the log, so that it never waits for the host to read a number.
        while len(in_flight) > (1 if device.type == "cuda" and not (evaluate_now or stopping) else 0):
            update = in_flight.popleft()
            loss, grad_norm, stops = update.numbers()
            with world.same_on_every_rank():
                check_finite(update.step, {"loss": loss, "norm of the gradient": grad_norm}, run)
            stopping = stopping or stops > 0  # summed over the ranks, so all of them stop after the same step
            validation = {}
            if evaluate_now and update.step == step:
                validation = evaluate(forward, dataset, config, world, device)
                with world.same_on_every_rank():
                    check_finite(step, {"validation loss": validation["val_loss"]}, run)
            if not world.is_main:
                continue
            tokens_per_s = config.tokens_per_step / update.seconds()
            mfu = tokens_per_s * flops_per_token / (gpu.bf16_tflops * 1e12 * world.size) if gpu else None
            log.write(
                step=update.step,
                tokens=update.step * config.tokens_per_step,
                loss=loss,
                lr=update.lr,
                grad_norm=grad_norm,
                tokens_per_s=tokens_per_s,
                mfu=mfu,
                memory=peak_memory(device),
                seconds=clock.seconds(),
                **validation,
            )
            speed = f"{tokens_per_s:,.0f} tok/s, mfu {'n/a' if mfu is None else f'{mfu:.1%}'}"
            bar.set_postfix_str(f"loss {loss:.3f}, {speed}", refresh=False)
            if bar.disable and clock.line_due():
                say(f"step {update.step}/{config.max_steps}: loss {loss:.4f}, {speed}")

        if evaluate_now or stopping:
            with world.same_on_every_rank():
                check_finite(step, {"largest weight": largest_weight(model)}, run)
        if world.is_main and (evaluate_now or stopping):
            improved = evaluate_now and (best is None or validation["val_loss"] < best)
            best = validation["val_loss"] if improved else best
            state = {"step": step, "seconds": clock.seconds(), "best_val_loss": best, "wandb": wandb_id}
            state |= {"config": config.flat(), **origin}
            checkpoint.save(run, state, model, optimizers, dataset.tokenizer, improved, config.keep_checkpoints)
            if evaluate_now:
                say(
                    f"step {step}: loss {loss:.4f}, validation {validation['val_loss']:.4f} nats per token, "
                    f"{validation['val_bpb']:.4f} bits per byte, {clock.seconds():.0f} s"
                )
                say(sample(model, dataset.tokenizer, prompt, config.seed))

    # ---- the end ----------------------------------------------------------------------------------------------------
    bar.close()
    stop.restore()
    if world.is_main:
        log.close()
        picture = plot_loss_curve(run)
        pointer = f", {picture}" if picture else ""
        say(f"{run}: step {step} of {config.max_steps}, {clock.seconds():.0f} s{pointer}")
    if step < config.max_steps:
        if world.is_main:
            say(f"stopped by a signal; continue with --resume={run}")
        sys.exit(128 + (stop.requested or signal.SIGTERM))


def resolve_settings(preset: dict, overrides: dict):
    """-> (TrainConfig, saved state or None, its checkpoint directory or None, lines to tell about a resume)."""
    if not (resume := overrides.get("resume", preset.get("resume"))):
        values = {"out_dir": "out/run"} | preset | overrides
        if init_from := values.get("init_from"):
            start = checkpoint.model_config(checkpoint.load_state(checkpoint.resolve(init_from)))
            config = init_config(init_from, asdict(start), values)
        else:
            config = build(values)
        if checkpoint.find_any(Path(config.out_dir), "last"):
            raise UserError(
                f"{config.out_dir} already holds a run: continue it with --resume, or choose another --out_dir"
            )
        return config, None, None, []
    path = resume if isinstance(resume, str) else (preset | overrides).get("out_dir") or "out/run"
    saved_at = checkpoint.resolve(path, prefer="last")
    saved = checkpoint.load_state(saved_at)
    missing = {"seconds", "best_val_loss", "wandb", "tokenizer"} - saved.keys()
    if missing:
        raise UserError(f"{saved_at} cannot be resumed: its state.json lacks {', '.join(sorted(missing))}")
    # The run goes on where it is, also when its directory has been moved.
    config, notes = resume_config(saved["config"] | {"out_dir": str(saved_at.parent)}, preset, overrides)
    elsewhere = Path(config.out_dir).resolve() != saved_at.parent.resolve()
    if elsewhere and checkpoint.find_any(Path(config.out_dir), "last"):
        raise UserError(
            f"{config.out_dir} already holds another run: choose another --out_dir to continue {saved_at} in"
        )
    if best_at := checkpoint.find(Path(config.out_dir), "best"):  # after going back, a later best stays the best
        known = [saved["best_val_loss"], checkpoint.load_state(best_at).get("best_val_loss")]
        saved["best_val_loss"] = min((value for value in known if value is not None), default=None)
    notes = [f"resuming {saved_at} at step {saved['step']}", *(f"  {note}" for note in notes)]
    return config, saved, saved_at, notes


def check_attention(config, device, dtype):
    """Refuse an implementation that cannot run here before anything is written."""
    if config.attention == "triton" and (reason := why_not_triton(device.type, config.model.head_dim, dtype)):
        raise UserError(f"attention=triton cannot run here: {reason}; use auto, torch or naive")


@contextmanager
def memory_in_words(config):
    """Say what to change when the model or the batch is too large for the machine."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"out of memory: lower micro_batch_size (now {config.micro_batch_size}; tokens_per_step can stay), "
            f"block_size or the model"
        ) from None


def open_training_data(config, world):
    """The prepared dataset; the default one is prepared on the spot, since it needs no download."""
    if world.is_main and any(name == "stdlib" for name, _ in parse_mixture(config.dataset)):
        prepare_stdlib()
    world.barrier()
    return open_datasets(config.dataset)


def update_weights(model, optimizers, loader, step, lr, config, world):
    """One optimizer step. Returns this rank's mean loss and the gradient's norm, as tensors still on the device."""
    # For the dropout: a function of (seed, step, rank). The factors only keep the three apart.
    torch.manual_seed(((config.seed * 1_000_003 + step) * 1_000_003 + world.rank) % 2**63)
    total, passes = 0.0, loader.micro_batches_per_step
    for m in range(passes):
        with world.no_averaging(model) if m < passes - 1 else nullcontext():
            loss = model(*loader.micro_batch(step, m)) * loader.weight(step, m)
            loss.backward()
        total += loss.detach()
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
    set_learning_rate(optimizers, lr)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def moment(device):
    """Now, on the device's own clock: a GPU gets to it when the work before it is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Update:
    """The numbers of one step, over all ranks, copied off the device without waiting for it."""

    def __init__(self, step, lr, began, loss, grad_norm, stop, world):
        self.step, self.lr, self._began = step, lr, began
        stops = torch.full_like(loss, stop is not None)
        values = world.sum(torch.stack([loss / world.size, grad_norm / world.size, stops]))
        self._values = values.to("cpu", non_blocking=loss.is_cuda)
        self._ended = moment(loss.device)

    def numbers(self) -> tuple[float, float, float]:
        """(loss, gradient norm, ranks asked to stop); waits until the step is done."""
        if isinstance(self._ended, torch.cuda.Event):
            self._ended.synchronize()
        loss, grad_norm, stops = self._values.tolist()
        return loss, grad_norm, stops

    def seconds(self) -> float:
        """How long the step took, without what stands between steps; after `numbers`."""
        if isinstance(self._ended, torch.cuda.Event):
            return self._began.elapsed_time(self._ended) / 1e3
        return self._ended - self._began


def check_finite(step, values: dict, run):
    """Stop at the first number that training cannot come back from, before it is saved."""
    for what, value in values.items():
        if not math.isfinite(value):
            last = checkpoint.find(run, "last")
            kept = f"the checkpoint {last} is intact" if last else "no checkpoint had been saved yet"
            raise UserError(
                f"the {what} is {value} at step {step}, so the run stops; {kept}. Try a lower learning_rate"
            )


@torch.no_grad()
def largest_weight(model) -> float:
    """Not finite as soon as one weight is not."""
    return torch.stack([parameter.abs().amax() for parameter in model.parameters()]).amax().item()


def usable_prompt(config, tokenizer) -> str:
    """sample_prompt, or an empty one, with a word why, where this tokenizer or block_size has no place for it."""
    try:
        if len(tokenizer.encode(config.sample_prompt)) < config.model.block_size:
            return config.sample_prompt
        reason = "it fills block_size"
    except UserError as error:
        reason = str(error)
    say(f"samples will start from nothing, not from sample_prompt={config.sample_prompt!r}: {reason}")
    return ""


def sample(model, tokenizer, prompt, seed) -> str:
    """A continuation of the prompt by the model as it stands."""
    engine = Engine(model, tokenizer, speculate=0)
    room = min(SAMPLE_TOKENS, engine.room(prompt))
    if room < 1:
        return "  | (no sample: block_size is 1)"
    done = engine.complete([prompt], Sampling(temperature=0.8, top_k=50), room, seed=seed)
    return "\n".join("  | " + line for line in (prompt + done[0].text).strip("\n").splitlines())


class StopOnSignal:
    """Ctrl-C and SIGTERM ask the loop to stop after the step in hand; a second one stops at once."""

    def __init__(self):
        self.requested: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}

    def _request(self, number, frame):
        self.requested = signal.Signals(number)
        say(f"{self.requested.name}: saving after this step (again to stop at once)")
        self.restore()

    def restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Clock:
    """Wall time of the whole run, over resumes: steps, evaluations, samples and checkpoints."""

    def __init__(self, seconds_before: float):
        now = time.perf_counter()
        self._start, self._line = now - seconds_before, now

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def line_due(self) -> bool:
        """Whether a log without a progress bar is to get its next line."""
        if time.perf_counter() - self._line < LINE_SECONDS:
            return False
        self._line = time.perf_counter()
        return True


def peak_memory(device) -> int:
    """Bytes: the most that tensors took on a GPU, or the most of this process's memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict:
    return {"python": platform.python_version(), "torch": torch.__version__}


def git_commit() -> str | None:
    """The commit of this code, with a + when there are changes on top; None outside a repository."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "") if commit.returncode == 0 else None


def introduction(config, dataset, loader, world, device, dtype, compiled, gpu, origin) -> str:
    """Every derived quantity with its formula, before the first step."""
    model, passes = config.model, loader.micro_batches_per_step
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    peak = f"{gpu.bf16_tflops:g} TFLOP/s bf16 peak" if gpu else "peak not in config/gpus.py, so mfu is n/a"
    group = model.n_head // model.n_kv_head
    kind = "MHA" if group == 1 else "MQA" if model.n_kv_head == 1 else "GQA"
    epochs = loader.epoch(config.max_steps)
    processes = f" x {world.size} processes" if world.size > 1 else ""
    return f"""{show(config)}
versions: {" ".join(f"{k} {v}" for k, v in origin["versions"].items())}, commit {origin["commit"]}
device: {device} ({name}), {str(dtype).removeprefix("torch.")}, {"compiled" if compiled else "not compiled"}, {peak}
{describe_backend(device, model.head_dim, dtype) if config.attention == "auto" else f"attention: {config.attention}"}
data: {dataset.name} ({dataset.hash[:12]}), {len(dataset.train):,} training and {len(dataset.val):,} validation tokens
model: {model.n_params():,} parameters, {kind} {model.n_head}/{model.n_kv_head} heads of {model.head_dim}, \
{model.flops_per_token(model.block_size):,} FLOPs a token, {model.kv_cache_bytes(1, 1):,} bytes of bf16 KV cache a token
step: {config.tokens_per_step:,} tokens = {passes} accumulated x {config.micro_batch_size} sequences x \
{model.block_size} tokens{processes}; {config.max_steps:,} steps = {epochs:.2f} epochs"""


if __name__ == "__main__":
    with exit_cleanly():
        main()
