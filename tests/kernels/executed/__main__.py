"""Execute the GPU kernels of an op on a sample of its record with this many rows and columns, forward and backward.

    python -m tests.kernels.executed masked_mean --shape 1100x32000 --dtype bf16

It prints each launch with its faults, and whether the results are right."""

import argparse
import sys
import time

from tests.kernels.executed import compiling, machine, subjects

DTYPES = {"bf16": subjects.BF16, "fp16": subjects.F16, "fp32": subjects.F32, "fp64": subjects.F64}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=subjects.launched(), metavar="OP")
    parser.add_argument("--shape", default="64x1000", metavar="ROWSxCOLUMNS")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--sample", help="its name in the record (default: the first whose rows lie along memory)")
    parser.add_argument("--arch", type=int, default=90, help="compute capability (default: 90, for 9.0)")
    parser.add_argument("--triton", default=compiling.pinned(), choices=(compiling.pinned(), compiling.oldest()))
    parser.add_argument("--orders", type=int, default=machine.ORDERS, help="of blocks and warps")
    parser.add_argument("--bias", type=int, default=0, choices=(-1, 0, 1), help="how approximations are rounded")
    args = parser.parse_args(argv)
    rows, columns = map(int, args.shape.split("x"))
    begin, subject = time.monotonic(), subjects.launched()[args.op]
    samples = subjects.rows_of(subject)
    if not samples or args.sample not in (None, *samples):
        parser.error(f"{args.op} has the samples {', '.join(samples) or 'of other shapes alone'}")
    sample = subjects.resized(samples[args.sample or next(iter(samples))], rows, columns)
    options = {"arch": args.arch, "version": args.triton, "orders": args.orders, "bias": args.bias}
    print(f"{args.op}, {sample.name}, {args.dtype}, sm_{args.arch}, Triton {args.triton}, {args.orders} orders")
    try:
        launches = subjects.assert_agrees(subject, sample, DTYPES[args.dtype], **options)
    except AssertionError as error:
        print(error)
        return 1
    for x in launches:
        print(f"{x.kernel}: grid {x.grid}, {x.threads} threads, {x.shared} bytes shared, {x.steps} steps of warps")
    print(f"right, and no events; {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
