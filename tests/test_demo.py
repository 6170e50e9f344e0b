"""The demo's claims, run: each usual loss fails in the stated way on this torch, and the safeops one learns."""

import math

import pytest
import torch

pytest.importorskip("skimage")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from safeops.demo import data, losses, picture, run, screen, training  # noqa: E402

STEPS = 12
pytestmark = pytest.mark.xdist_group("demo")


@pytest.fixture(scope="module")
def pair():
    return data.load()


@pytest.fixture(scope="module")
def runs(pair):
    """Every variant, a few steps; the usual ones stop after two idle steps."""
    names = list(screen.TITLES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "PATIENCE", 2)
        results = {name: training.train(getattr(losses, name), pair, steps=STEPS) for name in names}
    torch.set_num_threads(threads)
    return results


def test_the_data_is_the_calibrated_pair(pair):
    assert pair.left.shape == pair.right.shape == (1, 3, 500, 740)
    assert not pair.truth.isnan().any(), "unknown is inf in the file, whatever the docstring says"
    unknown = 1 - pair.known.float().mean().item()
    assert unknown == pytest.approx(0.074, abs=0.002)
    depth = data.FOCAL_BASELINE / pair.truth[pair.known]
    assert 2.0 < depth.min() < depth.max() < 5.1  # metres: a motorcycle in a garage
    # The right image holds left's pixel (y, x) at x - d: a wrong sign would make the two differ far more.
    d = (pair.truth - data.DOFFS)[0, 0]
    y, x = pair.known[0, 0].nonzero(as_tuple=True)
    there = (x - d[y, x]).round().long()
    seen = there >= 0
    y, x, there = y[seen], x[seen], there[seen]
    assert (pair.left[0][:, y, x] - pair.right[0][:, y, there]).abs().mean() < 0.05


def test_the_network_is_half_and_starts_with_zeros_like_any_relu(pair):
    torch.manual_seed(0)
    network = training.StereoNet()
    with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.float16):
        disparity = network(pair.left, pair.right)
    assert disparity.dtype == torch.float16 and disparity.shape == pair.truth.shape
    assert (disparity[pair.known] == 0).any(), "what boolean_index and where_after_division divide by"


def test_boolean_write_raises_in_backward(runs):
    assert "modified by an inplace operation" in runs["boolean_write"].exception
    assert screen.verdict(runs["boolean_write"]) == "raises at step 1"


def test_multiplying_by_the_mask_keeps_the_nan(runs):
    record = runs["multiply_by_mask"]
    assert all(math.isnan(s.loss) and s.skipped for s in record.steps) and record.gave_up


def test_1e_8_is_nothing_in_half(runs):
    assert torch.tensor(1e-8, dtype=torch.float16) == 0
    record = runs["boolean_index"]
    assert all(s.loss == math.inf and s.skipped for s in record.steps) and record.gave_up


def test_where_leaks_through_its_backward(runs):
    record = runs["where_after_division"]
    assert all(math.isfinite(s.loss) and not s.finite_gradients and s.skipped for s in record.steps)
    assert record.gave_up and screen.verdict(record) == "gradients not finite"


def test_counting_in_half_is_silent(runs, pair):
    assert pair.known.half().sum() == math.inf
    record = runs["half_mask"]
    assert all(s.loss == 0 and s.finite_gradients and not s.skipped and not s.moved for s in record.steps)
    assert record.gave_up and record.nonfinite_losses == record.skipped == 0


def test_no_usual_variant_moved_a_weight(runs):
    untrained = runs["with_safeops"].steps[0].epe
    for name in list(screen.TITLES)[:5]:
        assert runs[name].epe == pytest.approx(untrained, rel=1e-3), name
        assert not runs[name].learned, name


@pytest.mark.parametrize("name", ["with_safeops", "repaired_by_hand"])
def test_it_learns(runs, name):
    record = runs[name]
    assert len(record.steps) == STEPS
    assert record.skipped == record.nonfinite_losses == record.nonfinite_gradients == 0
    assert record.steps[-1].loss < 0.6 * record.steps[0].loss
    assert record.epe < 0.6 * record.steps[0].epe


def test_safeops_is_the_hand_repaired_loss(runs, pair):
    """Same value and gradient wherever no predicted disparity is below the floor of 1 pixel."""
    prediction = runs["with_safeops"].prediction.clamp(min=1.5)
    results = []
    for loss_function in (losses.repaired_by_hand, losses.with_safeops):
        disparity = prediction.clone().requires_grad_()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = loss_function(disparity, pair.truth)
        (loss * 65536).backward()
        results.append((loss.detach(), disparity.grad))
    (by_hand, hand_grad), (ours, our_grad) = results
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=0)
    torch.testing.assert_close(our_grad, hand_grad, rtol=2e-3, atol=1e-4)
    assert (our_grad[~pair.known] == 0).all()


def test_the_command_prints_a_table_and_draws_a_picture(runs, pair, tmp_path, capsys, monkeypatch):
    """`safeops demo` from end to end, on the recorded runs."""
    monkeypatch.setattr(training, "train", lambda loss, *_, on_step, **__: _replay(runs[loss.__name__], on_step))
    out = tmp_path / "demo.png"
    code = run.main(steps=STEPS, device="cpu", out=str(out))
    printed = capsys.readouterr().out
    assert code == (0 if runs["with_safeops"].learned else 1)
    for title, _ in screen.TITLES.values():
        assert printed.count(title) >= 2, title  # announced, and a row of the table
    assert "modified by an inplace operation" in " ".join(printed.split())
    with picture.Image.open(out) as image:
        assert image.width > 1000 and image.height > 600
    assert out.stat().st_size < 500_000


def _replay(record, on_step):
    for step in record.steps:
        on_step(step)
    return record


def test_a_run_that_did_not_learn_exits_1(runs, pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "train", lambda loss, *_, **__: runs["half_mask"])
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    assert run.main(steps=STEPS, device="cpu", out=str(tmp_path / "demo.png")) == 1
    assert "did not learn: loss is 0, silently" in capsys.readouterr().out
