"""Times every op beside a copy of as many bytes (the floor), the eager pattern, and torch.compile.

    python -m benchmarks [--device cpu|cuda] [--ops masked_mean,mse_loss] [--dtypes bf16,fp32] [--size 16M] [--quick]
    python -m benchmarks --compare OTHER_CHECKOUT    this build beside the build of another checkout
    python -m benchmarks.rivals [--device cpu|cuda]  safeops beside other libraries, and the patterns users write

A file per op family states what each op must read and write. `timing` measures. `report` judges, and writes to
build/benchmarks; the table of a full run goes to benchmarks/results, which is kept in git.
"""
