"""Two functions for each rule: one that goes wrong and one that does not (test_examples.py runs both)."""

EXAMPLES = {}

# the size of x[mask] depends on the data: a synchronization, and NaN where nothing is kept
EXAMPLES["SO101"] = (
    """
def masked_loss(prediction, target):
    mask = target > 0
    return (prediction - target)[mask].abs().mean()
""",
    """
def masked_loss(prediction, target):
    return safeops.l1_loss(prediction, target, mask=target > 0)
""",
)

# the write needs the number of True elements of the mask: a synchronization
EXAMPLES["SO102"] = (
    """
def fill_loss(prediction, target, teacher):
    mask = target < 0
    filled = target.clone()
    filled[mask] = teacher[mask]
    return (prediction - filled).abs().mean()
""",
    """
def fill_loss(prediction, target, teacher):
    filled = torch.where(target < 0, teacher, target)
    return (prediction - filled).abs().mean()
""",
)

# backward raises: a variable needed for gradient computation has been modified in place
EXAMPLES["SO103"] = (
    """
def relu_loss(score, target):
    score = torch.relu(score)
    score[score > 6] = 0
    return safeops.mse_loss(score, target)
""",
    """
def relu_loss(score, target):
    score = torch.relu(score)
    score = safeops.masked_fill(score, score > 6, 0)
    return safeops.mse_loss(score, target)
""",
)

# the size of the result depends on the data: a synchronization
EXAMPLES["SO104"] = (
    """
def positive_loss(logits, labels):
    index = torch.nonzero(labels > 0, as_tuple=True)
    return logits[index].square().mean(dtype=torch.float32)
""",
    """
def positive_loss(logits, labels):
    return safeops.masked_rms(logits, labels > 0).square()
""",
)

# the loss is NaN because of an element that is masked out
EXAMPLES["SO105"] = (
    """
def masked_loss(prediction, target):
    mask = target.isfinite()
    error = (prediction - target).abs() * mask
    return error.sum() / mask.sum().clamp(min=1)
""",
    """
def masked_loss(prediction, target):
    return safeops.l1_loss(prediction, target, mask=target.isfinite())
""",
)

# the loss is inf in fp16; the true value is 90000
EXAMPLES["SO201"] = (
    """
def square_loss(prediction, target):
    return ((prediction - target) ** 2).mean()
""",
    """
def square_loss(prediction, target):
    return safeops.mse_loss(prediction, target)
""",
)

# the loss and its gradient are NaN when nothing is valid
EXAMPLES["SO202"] = (
    """
def count_loss(error, mask):
    return (error.abs() * mask).sum() / mask.sum()
""",
    """
def count_loss(error, mask):
    return safeops.masked_mean(error.abs(), mask)
""",
)

# the gradient is NaN at 0
EXAMPLES["SO204"] = (
    """
def distance_loss(a, b):
    return torch.sqrt((a - b).abs()).mean()
""",
    """
def distance_loss(a, b):
    return safeops.safe_sqrt((a - b).abs()).mean()
""",
)

# the gradient of a zero vector is NaN
EXAMPLES["SO205"] = (
    """
def length_loss(x):
    return torch.sqrt(torch.sum(x**2, dim=-1)).mean()
""",
    """
def length_loss(x):
    return safeops.safe_norm(x, dim=-1).mean()
""",
)

# the loss is inf in fp16
EXAMPLES["SO206"] = (
    """
def entropy_loss(p):
    return -torch.log(p + 1e-8).mean()
""",
    """
def entropy_loss(p):
    return -safeops.safe_log(p, eps=1e-8).mean()
""",
)

# a row whose elements are all masked is NaN
EXAMPLES["SO207"] = (
    """
def attention(scores: torch.Tensor, hidden: torch.Tensor):
    return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
""",
    """
def attention(scores: torch.Tensor, hidden: torch.Tensor):
    return safeops.masked_softmax(scores, ~hidden, dim=-1)
""",
)

# the loss is finite, but its gradient is NaN
EXAMPLES["SO208"] = (
    """
def ratio_loss(a, b):
    return torch.where(b != 0, a / b, 0).mean()
""",
    """
def ratio_loss(a, b):
    return safeops.safe_div(a, b).mean()
""",
)

# the loss is 1 and its gradient 0 for a perfect prediction of 300 x 300 pixels in fp16
EXAMPLES["SO210"] = (
    """
def dice_loss(p, t):
    overlap = (p * t).sum()
    return 1 - (2 * overlap + 1) / ((p + t).sum() * 2 + 1)
""",
    """
def dice_loss(p, t):
    return safeops.dice_loss(p, t)
""",
)

# the loss is inf in fp16 at 12
EXAMPLES["SO211"] = (
    """
def margin_loss(score):
    return torch.log(1 + torch.exp(score)).mean()
""",
    """
def margin_loss(score):
    return F.softplus(score).mean()
""",
)

# the variance of numbers around 4096 with spread 0.5 is not 0.25
EXAMPLES["SO212"] = (
    """
def spread_loss(x):
    return (x**2).mean() - x.mean() ** 2
""",
    """
def spread_loss(x):
    return safeops.masked_var(x, correction=0)
""",
)

# the host reads the value: a synchronization
EXAMPLES["SO301"] = (
    """
def count_loss(error, valid):
    count = max(valid.sum().item(), 1)
    return error.abs().sum() / count
""",
    """
def count_loss(error, valid):
    count = valid.sum().clamp(min=1)
    return error.abs().sum() / count
""",
)

# the host reads the values: a synchronization
EXAMPLES["SO302"] = (
    """
def noisy_loss(prediction, target):
    loss = (prediction - target).abs().mean()
    print("loss", loss)
    return loss
""",
    """
def quiet_loss(prediction, target):
    loss = (prediction - target).abs().mean()
    return loss, loss.detach()
""",
)

# the host reads the value: a synchronization
EXAMPLES["SO303"] = (
    """
def masked_loss(error, valid):
    if valid.sum() == 0:
        return error.sum() * 0
    return safeops.masked_mean(error, valid)
""",
    """
def masked_loss(error, valid):
    return safeops.masked_mean(error, valid)
""",
)

# the loss is fp16, and inf once it is scaled by 65536
EXAMPLES["SO401"] = (
    """
def step(model, x, target):
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x)
        loss = (prediction - target.half()).abs().mean()
    return loss
""",
    """
def step(model, x, target):
    with torch.autocast("cpu", dtype=torch.float16):
        prediction = model(x)
        loss = safeops.l1_loss(prediction, target)
    return loss
""",
)

# raises RuntimeError under CUDA autocast
EXAMPLES["SO402"] = (
    """
def step(model, x, y):
    with torch.autocast("cuda"):
        loss = F.binary_cross_entropy(torch.sigmoid(model(x)), y)
    return loss
""",
    """
def step(model, x, y):
    with torch.autocast("cuda"):
        loss = F.binary_cross_entropy_with_logits(model(x), y)
    return loss
""",
)

# the step is 65536 times too short
EXAMPLES["SO406"] = (
    """
def train(model, x, y, optimizer, scaler):
    scaler.scale(safeops.mse_loss(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
    """
def train(model, x, y, optimizer, scaler):
    scaler.scale(safeops.mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
""",
)
