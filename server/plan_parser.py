"""The flags of `shuntyard plan`, `estimate` and `hardware`."""

from __future__ import annotations

import argparse
from typing import Any

from placement.plan import Goal
from placement.workload import WORKLOADS
from server.plan_inputs import FIDELITIES, FIGURES, SOLVERS

COMMANDS = ("plan", "estimate", "hardware")

PLAN_EPILOG = """\
cluster.yaml lists what may be rented:

  offers:
    - {shape: g6.12xlarge, count: 3, market: spot, zone: use1-az4}
    - {shape: g6e.xlarge, count: 4}                  # on demand, at the catalogue's price
    - {gpu: RTX4090, gpus_per_node: 2, nodes: 4, price_usd_per_hour: 0.8}

examples:
  shuntyard plan --model Qwen/Qwen3-32B --cluster cluster.yaml --workload azure-conv --explain
  shuntyard plan --model ./my-model --cluster cluster.yaml --workload 2000x300@3 \\
      --objective cost-for-load --slo-ttft 2s --slo-tpot 100ms --output plan.json
  shuntyard serve ./my-model --plan plan.json
  shuntyard plan --model ./my-model --cluster now.yaml --workload 2000x300@3 \\
      --running plan.json --lost 2 --output next.json   # a machine of pipeline 2 was taken away
"""
ESTIMATE_EPILOG = """\
examples:
  shuntyard estimate --model Qwen/Qwen3-32B --gpu L4 --tp 4 --layers 20 --batch 32 \\
      --input 763 --output 232 --json
  shuntyard estimate --model Qwen/Qwen3-32B --gpu L4 --layers 1 --bare --tokens 2000 --batch 8 \\
      --context 900                                  # one layer, to compare with a measurement
"""


def add_commands(commands: Any) -> None:
    """The parsers of the placement commands. Values are text: they are read where they are used."""
    _add_plan(commands)
    _add_estimate(commands)
    hardware = commands.add_parser(
        "hardware",
        help="list the known GPUs and cloud machines",
        description="List every GPU and cloud machine of the catalogue: spec and calibrated "
        "figures, prices, and the source of each.",
        allow_abbrev=False,
    )
    _add_hardware_flag(hardware)
    _add_json(hardware)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the best fleet for a model out of unequal machines",
        description="Find which machines to rent for a model, and how to cut the model over them.",
        epilog=PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(plan)
    plan.add_argument("--cluster", metavar="FILE", required=True, help="cluster.yaml: the offers")
    plan.add_argument(
        "--workload",
        metavar="NAME|INxOUT[@RATE]",
        required=True,
        help="mean prompt and output tokens and requests per second: "
        f"{', '.join(WORKLOADS)}, or numbers (763x232@4.67)",
    )
    goal = plan.add_argument_group("what is wanted")
    defaults = Goal()
    goal.add_argument(
        "--objective",
        metavar="OBJECTIVE",
        default=defaults.objective,
        help="throughput-per-dollar, throughput, or cost-for-load: the cheapest fleet for --load "
        "(default: %(default)s)",
    )
    goal.add_argument(
        "--load",
        metavar="RPS",
        help="requests per second that cost-for-load must serve (default: the workload's rate)",
    )
    goal.add_argument(
        "--slo-ttft", metavar="TIME", help="limit of the time to first token: 2s, 800ms"
    )
    goal.add_argument("--slo-tpot", metavar="TIME", help="limit of the time per output token")
    goal.add_argument("--slo-latency", metavar="TIME", help="limit of the time of a whole request")
    goal.add_argument(
        "--latency-penalty",
        metavar="N",
        help="what a missed SLO costs: the share of throughput lost per share of excess; without "
        "it, SLOs are hard limits",
    )
    goal.add_argument("--max-price", metavar="USD", help="cap on the fleet's price an hour")
    goal.add_argument(
        "--on-demand-share",
        metavar="SHARE",
        help="of the throughput, at least so much from pipelines without spot machines (0 to 1)",
    )
    goal.add_argument(
        "--max-zone-share",
        metavar="SHARE",
        help="of the throughput, at most so much from pipelines that need one zone (0 to 1)",
    )
    goal.add_argument(
        "--recovery",
        metavar="TIME",
        help="how long a pipeline serves nothing after one of its machines was taken away: what "
        "interruptions_per_hour in cluster.yaml cost (default: nothing; the paper measured 111s)",
    )
    search = plan.add_argument_group("the search")
    search.add_argument(
        "--solver",
        metavar="|".join(SOLVERS),
        default="exact",
        help="exact, with a bound on the optimum, or the paper's beam search as a baseline "
        "(default: %(default)s)",
    )
    search.add_argument(
        "--beam",
        metavar="K",
        help="partial placements that the paper's search keeps (default: 3)",
    )
    search.add_argument(
        "--time-limit",
        metavar="TIME",
        default="60s",
        help="then the best that was found, with its gap (default: %(default)s); --explain may "
        "take as long again",
    )
    _add_fidelity(search)
    _add_hardware_flag(search)
    running = plan.add_argument_group("a fleet that runs already")
    running.add_argument(
        "--running",
        metavar="FILE",
        help="the plan that runs, as --output wrote it: which of its pipelines go on, and which "
        "start, on the machines that --cluster says there are now",
    )
    running.add_argument(
        "--lost",
        metavar="N[,N]",
        help="pipelines of it that have lost a machine, by their numbers, from 1; those whose "
        "machines --cluster does not offer any more are lost by themselves",
    )
    running.add_argument(
        "--start-up",
        metavar="TIME",
        help="how long a pipeline that starts serves nothing (default: 111.3s, as the paper "
        "measured)",
    )
    running.add_argument(
        "--horizon",
        metavar="TIME",
        help="how long the fleet is expected to stay as it is then (default: 1h)",
    )
    output = plan.add_argument_group("the answer")
    output.add_argument(
        "--explain",
        action="store_true",
        help="also what holds each pipeline back, the runner-ups, and what would change the answer",
    )
    output.add_argument(
        "--output", metavar="FILE", help="write the plan for `shuntyard serve --plan FILE`"
    )
    _add_json(output)


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="how long some layers of a model take on one kind of GPU",
        description="Estimate prefill, decoding, the largest batch and the throughput of some "
        "layers of a model on one kind of GPU, operation by operation.",
        epilog=ESTIMATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(estimate)
    estimate.add_argument("--gpu", metavar="GPU", required=True, help="as `hardware` lists them")
    estimate.add_argument("--tp", metavar="N", default="1", help="GPUs that share each layer")
    estimate.add_argument("--layers", metavar="N", help="layers (default: all of the model)")
    estimate.add_argument(
        "--batch", metavar="N", help="requests together (default: as many as fit)"
    )
    estimate.add_argument(
        "--input", metavar="N", default="763", help="prompt tokens (default: %(default)s)"
    )
    estimate.add_argument(
        "--output", metavar="N", default="232", help="output tokens (default: %(default)s)"
    )
    estimate.add_argument(
        "--bare",
        action="store_true",
        help="without embedding, logits and links: to compare layers with a measurement",
    )
    estimate.add_argument(
        "--tokens",
        metavar="N",
        help="tokens of the prefill, in prompts of --input tokens, instead of batch × input",
    )
    estimate.add_argument(
        "--context",
        metavar="N",
        help="KV length of every decode step, instead of the mean over the output",
    )
    _add_fidelity(estimate)
    _add_hardware_flag(estimate)
    _add_json(estimate)


def _add_model(parser: Any) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a folder with config.json, that file, or a name on the Hugging Face hub (well-known "
        "ones are shipped)",
    )
    formats = parser.add_argument_group("formats (vLLM's flags)")
    formats.add_argument("--dtype", metavar="TYPE", help="of weights and activations")
    formats.add_argument(
        "--quantization", metavar="METHOD", help="of the weights, if not the checkpoint's own"
    )
    formats.add_argument("--kv-cache-dtype", metavar="TYPE", help="of the KV cache: auto, fp8, …")


def _add_fidelity(parser: Any) -> None:
    parser.add_argument(
        "--model-fidelity",
        metavar="|".join(FIDELITIES),
        default="calibrated",
        help="the paper's formulas, or those corrected by measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--figures",
        metavar="|".join(FIGURES),
        default="calibrated",
        help="the catalogue's figures of GPUs and links: of spec sheets, or what real work gets "
        "(default: %(default)s)",
    )


def _add_hardware_flag(parser: Any) -> None:
    parser.add_argument(
        "--hardware",
        metavar="FILE",
        help="YAML file of GPUs, links and machines over the catalogue, as `calibrate` writes it",
    )


def _add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
