"""Speed as a share of the floor: every op beside a copy of as many bytes, the eager pattern, and torch.compile.

    python -m benchmarks [--device cpu|cuda] [--ops masked_mean,mse_loss] [--dtypes bf16,fp32] [--size 16M] [--quick]
    python -m benchmarks --compare OTHER_CHECKOUT    its build beside this one
    python -m benchmarks.rivals [--device cpu|cuda]  beside other libraries, and what users write

A file per op family says what each op must read and write; `timing` measures, `report` judges and writes: to
build/benchmarks, and the table of a full run to results/, where it is kept.
"""
