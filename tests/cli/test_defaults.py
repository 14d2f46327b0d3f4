"""The defaults of hardware and objective: the same in Python and of the commands."""

import inspect
import json

import typer
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.sharding import advise, propagate
from ascend_parallel.training import Strategy
from ascend_parallel.training.degrees.search import search_degrees
from ascend_parallel.tuning.cost_model.hardware import DEFAULT_HARDWARE, find_hardware

COMMANDS = typer.main.get_command(app).commands


def option(command, name):
    return next(each.default for each in COMMANDS[command].params if each.name == name)


def argument(function, name):
    return inspect.signature(function).parameters[name].default


def test_the_objective_is_the_same_in_python_and_of_the_command():
    assert option("propagate", "objective") == argument(propagate, "objective") == "time"


def test_the_hardware_is_the_same_everywhere():
    functions = [argument(each, "hardware") for each in (propagate, advise, search_degrees)]
    commands = [option(each, "hardware") for each in ("propagate", "plan-training")]
    assert {*functions, *commands, Strategy(mesh={"dp": 1}).hardware} == {DEFAULT_HARDWARE}


def test_a_prediction_without_hardware_is_for_the_default():
    words = ["predict", "--model", "llama2-7b", "--json"]
    found, named = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout) for more in ((), ("--hardware", DEFAULT_HARDWARE))
    )
    assert found == named
    assert find_hardware(DEFAULT_HARDWARE).name in json.dumps(found)
