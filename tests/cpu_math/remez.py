"""Finds the polynomials of csrc/cpu/math.h: `python tests/cpu_math/remez.py` prints them all.

It runs Remez' exchange algorithm with 45 digits. Each result is the polynomial of its degree with the smallest maximum
error, relative to the value of the whole function.
"""

import struct

from mpmath import asin, atan, cos, exp, expm1, log, lu_solve, matrix, mp, mpf, pi, polyval, sqrt

mp.dps = 45
ROUND = {
    "float": lambda x: mpf(struct.unpack("f", struct.pack("f", float(x)))[0]),
    "double": lambda x: mpf(float(x)),
}


def fit(target, weight, low, high, degree):
    """Returns (coefficients of the polynomial that minimizes max |weight (target - polynomial)|, that maximum)."""
    count = degree + 1

    def chebyshev(n):
        return [(low + high) / 2 - (high - low) / 2 * cos(pi * (i + mpf(0.5)) / n) for i in range(n)]

    grid = chebyshev(400)
    samples = [(x, weight(x), target(x)) for x in grid]
    points = [(x, weight(x), target(x)) for x in chebyshev(count + 1)]
    for _ in range(15):
        rows = [[w * x**k for k in range(count)] + [(-1) ** i] for i, (x, w, _) in enumerate(points)]
        result = lu_solve(matrix(rows), matrix([w * y for _, w, y in points]))
        errors = [w * (y - polyval(result[count - 1 :: -1], x)) for x, w, y in samples]
        runs = []  # the largest error of each interval between two changes of its sign
        for e, point in zip(errors, samples, strict=True):
            if runs and (e > 0) == (runs[-1][0] > 0):
                runs[-1] = max(runs[-1], (e, point), key=lambda run: abs(run[0]))
            else:
                runs.append((e, point))
        while len(runs) > count + 1:
            runs.remove(min(runs[0], runs[-1], key=lambda run: abs(run[0])))
        if len(runs) < count + 1:
            break
        points = [point for _, point in runs]
        if abs(result[count]) * mpf(1.01) > max(map(abs, errors)):
            break
    return list(result[:count]), max(map(abs, errors))


def show(name, type_, target, weight, low, high, degree):
    results, worst = fit(target, weight, low, high, degree)
    print(f"// {name}, {type_}, degree {degree}: relative error 2^{float(log(worst, 2)):.1f}")
    print("  " + ", ".join(float(ROUND[type_](c)).hex() + "f" * (type_ == "float") for c in results))


TINY = mpf(10) ** -9  # the quotients below have removable singularities at 0


def away(x):
    return x if abs(x) > TINY else TINY


def log_tail(f):  # log(1 + f) = f - f^2/2 + f^3 P(f)
    f = away(f)
    return (log(1 + f) - f + f * f / 2) / f**3


def log_ratio(z):  # log((1 + s)/(1 - s)) = 2 s + s z P(z), z = s^2
    s = sqrt(away(z))
    return (log((1 + s) / (1 - s)) - 2 * s) / s**3


def log_ratio_tail(z):  # log((1 + s)/(1 - s)) = 2/3 s (3 + z + z^2 P(z))
    s = sqrt(max(z, mpf(10) ** -14))
    return (log((1 + s) / (1 - s)) * 3 / (2 * s) - 3 - s * s) / s**4


def exp_tail(r):  # exp(r) = 1 + r + r^2 P(r)
    r = away(r)
    return (expm1(r) - r) / r**2


def exp2_tail(f):  # 2^f = 1 + f P(f)
    f = away(f)
    return expm1(f * log(2)) / f


def asin_tail(z):  # asin(x) = x + x z P(z), z = x^2
    x = sqrt(away(z))
    return (asin(x) - x) / x**3


def atan_tail(z):  # atan(t) = t + t z P(z), z = t^2
    t = sqrt(away(z))
    return (atan(t) - t) / t**3


def main():
    mpf_half_log2 = log(2) / 2 * mpf("1.0001")
    root = sqrt(mpf(2))
    for type_, degree in (("float", 7), ("float", 8)):
        show("log", type_, log_tail, lambda f: f**3 / log(1 + away(f)), 1 / root - 1, root - 1, degree)
    z = ((root - 1) / (root + 1)) ** 2 * mpf("1.0001")
    for degree in (4, 5, 6):
        show("log_ratio", "double", log_ratio, lambda z: z / 2, mpf(0), z, degree)
    for degree in (5, 6):
        show("log_ratio_tail", "double", log_ratio_tail, lambda z: z * z / 3, mpf(0), mpf("0.01031"), degree)
    for type_, degree in (("float", 4), ("float", 5), ("double", 5), ("double", 9), ("double", 10)):
        show("exp", type_, exp_tail, lambda r: r * r / exp(r), -mpf_half_log2, mpf_half_log2, degree)
    show("exp2", "float", exp2_tail, lambda f: abs(f) / 2**f, mpf("-0.50005"), mpf("0.50005"), 4)
    for type_, degree in (("float", 4), ("float", 5), ("double", 11), ("double", 12)):
        show("asin", type_, asin_tail, lambda z: z / (1 + z * asin_tail(z)), mpf(0), mpf("0.25"), degree)
    for degree in (4, 5, 10, 11):
        show(
            "atan",
            "double",
            atan_tail,
            lambda z: z / (1 + z * atan_tail(z)),
            mpf(0),
            (root - 1) ** 2 * mpf("1.0001"),
            degree,
        )


if __name__ == "__main__":
    main()
