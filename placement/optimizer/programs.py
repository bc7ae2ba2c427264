"""Linear and integer programs over columns, by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from placement.roofline import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Maximise profit · x subject to rows · x ≤ limits, x ≥ 0. rows: [row, column]."""

    profit: Array
    rows: Array
    limits: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """x: [column]. duals: [row], what one more unit of each limit is worth (of the relaxation).
    bound: no solution is worth more."""

    value: float
    x: Array
    duals: Array
    bound: float


def solve_program(
    program: Program, *, is_integer: bool, time_limit_s: float = np.inf
) -> Solution | None:
    """The best solution; None where there is none, or none was found in time."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_abs_gap", 1e-12)
    highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
    highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
    if np.isfinite(time_limit_s):
        highs.setOptionValue("time_limit", max(time_limit_s, 0.01))
    highs.passModel(_model(program, is_integer))
    highs.run()
    found, info = highs.getSolution(), highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    value = float(info.objective_function_value)
    is_proven = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    duals = np.zeros(len(program.limits)) if is_integer else np.array(found.row_dual)
    return Solution(
        value=value,
        x=np.array(found.col_value),
        duals=duals,
        bound=value if is_proven or not is_integer else float(info.mip_dual_bound),
    )


def _model(program: Program, is_integer: bool) -> highspy.HighsLp:
    num_rows, num_columns = program.rows.shape
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = program.profit
    model.col_lower_ = np.zeros(num_columns)
    model.col_upper_ = np.full(num_columns, highspy.kHighsInf)
    model.row_lower_ = np.full(num_rows, -highspy.kHighsInf)
    model.row_upper_ = program.limits
    model.sense_ = highspy.ObjSense.kMaximize
    by_column = program.rows.T
    column, row = np.nonzero(by_column)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(column, np.arange(num_columns + 1))
    model.a_matrix_.index_ = row
    model.a_matrix_.value_ = by_column[column, row]
    if is_integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    return model
