"""The demo's claims: each usual loss fails in the stated way because of the data alone, and safeops' one learns."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("skimage")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from safeops.demo import data, losses, network, picture, run, screen, training  # noqa: E402

STEPS = 12
pytestmark = pytest.mark.xdist_group("demo")


def crop(pair, height, width):
    """Returns the upper left part, of this size, of a region of the pair with near and far pixels."""
    parts = {name: image[..., 120 : 120 + height, 300 : 300 + width] for name, image in vars(pair).items()}
    return dataclasses.replace(pair, **parts)


@pytest.fixture(scope="module")
def pair():
    return data.load()


@pytest.fixture(scope="module")
def part(pair):
    """Returns a fifth of the pair, with more measured pixels than half can count (65504)."""
    part = crop(pair, 232, 320)
    assert part.known.sum() > 65520 > 65504
    return part


@pytest.fixture(scope="module")
def runs(part):
    """Returns a run with each loss of the demo, of at most STEPS steps; it stops after two in a row that move no
    weight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "PATIENCE", 2)
        return {f.__name__: training.train(f, part, steps=STEPS) for f in losses.VERDICTS}


def test_the_data_is_the_calibrated_pair(pair):
    assert pair.left.shape == pair.right.shape == (1, 3, 500, 740)
    assert pair.truth.isfinite().all() and (pair.truth >= 0).all(), "unknown is inf in the file, and 0 here"
    unknown = 1 - pair.known.float().mean().item()
    assert unknown == pytest.approx(0.074, abs=0.002)
    depth = data.FOCAL_BASELINE / pair.truth[pair.known]
    assert 2.0 < depth.min() < depth.max() < 5.1  # meters: the scene is a motorcycle in a garage
    # The right image has the left's pixel (y, x) at x - d: with the wrong sign, the two would differ far more.
    d = (pair.truth - data.DOFFS)[0, 0]
    y, x = pair.known[0, 0].nonzero(as_tuple=True)
    there = (x - d[y, x]).round().long()
    seen = there >= 0
    y, x, there = y[seen], x[seen], there[seen]
    assert (pair.left[0][:, y, x] - pair.right[0][:, y, there]).abs().mean() < 0.05


def test_the_network_is_half(part):
    torch.manual_seed(0)
    with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.float16):
        disparity = network.StereoNet()(part.left, part.right)
    assert disparity.dtype == torch.float16 and disparity.shape == part.truth.shape


def test_each_run_ends_as_it_must(runs):
    assert {f: screen.verdict(runs[f.__name__]) for f in losses.VERDICTS} == losses.VERDICTS
    assert "modified by an inplace operation" in runs["boolean_write"].exception
    for f in losses.USUAL[1:]:
        assert runs[f.__name__].gave_up and not any(s.moved for s in runs[f.__name__].steps), f


def test_which_steps_the_scaler_skips(runs):
    """GradScaler must skip each step whose gradients are NaN, and no step whose loss is 0."""
    for f in (losses.multiply_by_mask, losses.half_eps, losses.where_after_log):
        assert all(s.skipped and not s.finite_gradients for s in runs[f.__name__].steps), f
    assert all(math.isfinite(s.loss) for s in runs["where_after_log"].steps)
    assert all(s.loss == 0 and s.finite_gradients and not s.skipped for s in runs["half_mask"].steps)


class Ulps(network.StereoNet):
    """Predicts disparities that are one fp16 step off at two thirds of the pixels."""

    def change(self, bits):
        return bits + torch.randint(-1, 2, bits.shape, generator=self.generator).to(bits)

    def forward(self, left, right):
        disparity = super().forward(left, right)
        self.generator = torch.Generator().manual_seed(7)
        bits = self.change(disparity.detach().view(torch.int16)).clamp(min=0)  # no prediction is negative
        changed = bits.view(torch.float16)
        assert (changed != disparity).any()
        return torch.relu(disparity + (changed - disparity.detach()))


class MoreZeros(Ulps):
    """Predicts the disparities of Ulps, but an exact 0 at one pixel in 200, measured or not."""

    def change(self, bits):
        return super().change(bits) * (torch.rand(bits.shape, generator=self.generator) > 1 / 200).to(bits)


class NoZeros(Ulps):
    """Predicts the smallest positive number in place of 0."""

    def change(self, bits):
        return super().change(bits).clamp(min=1)


@pytest.mark.parametrize("changed", [Ulps, MoreZeros, NoZeros])
def test_no_verdict_depends_on_what_the_network_rounds_to(part, monkeypatch, changed):
    monkeypatch.setattr(training, "StereoNet", changed)
    monkeypatch.setattr(training, "PATIENCE", 1)
    for f, expected in losses.VERDICTS.items():
        assert screen.verdict(training.train(f, part, steps=STEPS)) == expected, f


@pytest.mark.parametrize("value", [1.0, 40.0, 60000.0, None], ids=str)
def test_any_prediction_fails(part, value):
    """The usual losses fail for constant and random disparities: the data alone is the cause."""
    x = torch.rand(part.truth.shape) * 64 + 1 if value is None else torch.full(part.truth.shape, value)
    for f in losses.USUAL:
        x = x.detach().half().requires_grad_()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = f(torch.relu(x), part.truth)
        if f is losses.boolean_write:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            continue
        loss.backward()
        if f is losses.half_mask:
            assert loss == 0 and (x.grad == 0).all()
        else:
            assert loss.isfinite() == (f is losses.where_after_log)
            # value 1 is the bound of these losses' clamp: from torch 2.14 on, clamp has no gradient at its bound
            assert x.grad[~part.known].isnan().all() or value == 1 and torch.__version__ >= "2.14", f


@pytest.mark.parametrize("f", losses.USUAL[1:])
def test_without_its_cause_a_usual_loss_is_right(pair, f):
    """If every pixel is measured, and few enough for half to count, a usual loss equals the hand-repaired one."""
    small = crop(pair, 160, 200)
    truth = torch.where(small.known, small.truth, 50)
    results = []
    for loss_function in (f, losses.repaired_by_hand):
        disparity = (torch.rand(truth.shape, generator=torch.Generator().manual_seed(1)) * 64 + 2).half()
        disparity.requires_grad_()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = loss_function(disparity, truth)
        (4096 * loss).backward()
        results.append((loss.detach(), disparity.grad))
    (loss, grad), (by_hand, expected) = results
    torch.testing.assert_close(loss.float(), by_hand, rtol=2e-3, atol=0)
    torch.testing.assert_close(grad, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["with_safeops", "repaired_by_hand"])
def test_it_learns(runs, name):
    record = runs[name]
    assert len(record.steps) == STEPS
    assert record.skipped == record.nonfinite_losses == record.nonfinite_gradients == 0
    assert record.steps[-1].loss < 0.6 * record.steps[0].loss
    assert record.epe < 0.6 * record.steps[0].epe


def test_safeops_is_the_hand_repaired_loss(runs, part):
    """The value and gradient are equal if no predicted disparity is below the floor of 1 pixel."""
    prediction = runs["with_safeops"].prediction.clamp(min=1.5)
    results = []
    for loss_function in (losses.repaired_by_hand, losses.with_safeops):
        disparity = prediction.clone().requires_grad_()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = loss_function(disparity, part.truth)
        (loss * 65536).backward()
        results.append((loss.detach(), disparity.grad))
    (by_hand, hand_grad), (ours, our_grad) = results
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=0)
    torch.testing.assert_close(our_grad, hand_grad, rtol=2e-3, atol=1e-4)
    assert (our_grad[~part.known] == 0).all()


def test_torch_itself_convolves_on_one_thread(part):
    """One thread without oneDNN, whose native fp16 is slow with few channels; the caller's settings are restored."""
    before, seen = (torch.get_num_threads(), torch.backends.mkldnn.enabled), []
    training.train(
        losses.half_mask,
        part,
        steps=1,
        on_step=lambda _: seen.append((torch.get_num_threads(), torch.backends.mkldnn.enabled)),
    )
    assert seen == [(1, False)] and before == (torch.get_num_threads(), torch.backends.mkldnn.enabled)


@pytest.fixture
def replayed(runs, part, monkeypatch):
    """`safeops demo` from start to end with recorded runs, which a test can replace in the returned dict."""

    def replay(loss, *_, on_step, **__):
        for step in records[loss.__name__].steps:
            on_step(step)
        return records[loss.__name__]

    records = dict(runs)
    monkeypatch.setattr(training, "train", replay)
    monkeypatch.setattr(data, "load", lambda device: part)
    return records


def test_the_command_prints_a_table_and_draws_a_picture(replayed, tmp_path, capsys):
    out = tmp_path / "demo.png"
    code = run.main(steps=STEPS, device="cpu", out=str(out))
    printed = capsys.readouterr().out
    assert code == 0 and "learned" in printed
    for title, _ in screen.TITLES.values():
        assert printed.count(title) >= 2, title  # once as it runs, once in the table
    assert "modified by an inplace operation" in " ".join(printed.split())
    with picture.Image.open(out) as image:
        assert image.width > 1000 and image.height > 600
    assert out.stat().st_size < 500_000


@pytest.mark.parametrize(
    "name, instead, line",
    [
        (
            "with_safeops",
            "half_mask",
            "safeops: loss is 0, silently; expected on any device: learns (12 steps may be too few).",
        ),
        (
            "repaired_by_hand",
            "where_after_log",
            "repaired by hand: gradients not finite; expected on any device: learns",
        ),
        ("where_after_log", "with_safeops", "where(): learns; expected on any device: gradients not finite."),
        ("boolean_write", "with_safeops", "boolean write: learns; expected on any device: raises at step 1."),
        (
            "half_mask",
            "half_eps",
            "mask in half: loss is nan from step 1; expected on any device: loss is 0, silently.",
        ),
    ],
)
def test_a_run_that_ends_otherwise_is_named_and_exits_1(
    replayed, runs, name, instead, line, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    replayed[name] = dataclasses.replace(runs[instead], name=name)
    assert run.main(steps=STEPS, device="cpu", out=str(tmp_path / "demo.png")) == 1
    assert line in " ".join(capsys.readouterr().out.split())
