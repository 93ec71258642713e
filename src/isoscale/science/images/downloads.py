"""What can be fetched: data sets and pretrained weights, where they come from, and the hashes of their contents."""

from pathlib import Path

from isoscale.data.files import GZIP_SUFFIX
from isoscale.data.tools.published import Entry

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST = Entry(
    name="mnist",
    title="MNIST: 70,000 handwritten digits of 28×28 pixels",
    folder="mnist",
    files=dict(
        zip(
            IDX_NAMES,
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            strict=True,
        )
    ),
    addresses=(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    suffix=GZIP_SUFFIX,
    usage="isoscale train images/mnist",
)
FASHION_MNIST = Entry(
    name="fashion-mnist",
    title="Fashion-MNIST: 70,000 pictures of clothes of 28×28 pixels",
    folder="fashion-mnist",
    files=dict(
        zip(
            IDX_NAMES,
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            strict=True,
        )
    ),
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    suffix=GZIP_SUFFIX,
    elsewhere=(Path("/usr/share/datasets/fashion-mnist"),),
    usage="isoscale train images/fashion-mnist",
)
CIFAR10 = Entry(
    name="cifar10",
    title="CIFAR-10: 60,000 colour pictures of 32×32 pixels in ten classes",
    folder="cifar10",
    inside="cifar-10-batches-bin",
    files={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    addresses=("https://www.cs.toronto.edu/~kriz/",),
    archive="cifar-10-binary.tar.gz",
    other_version=("cifar-10-batches-py", (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")),
    usage="isoscale train images/cifar10-resnet18",
)


def _weights(model: str, file: str) -> Entry:
    return Entry(
        name=f"{model}-imagenet",
        title=f"weights of {model.replace('resnet', 'ResNet-')}, trained on ImageNet (torchvision)",
        folder="weights",
        files={file: file.rpartition("-")[2].removesuffix(".pth")},
        addresses=("https://download.pytorch.org/models/",),
        usage=f"isoscale train RECIPE task.init_from={{folder}}/{file}",
    )


DATA_SETS = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10)}
WEIGHTS = {
    entry.name: entry
    for entry in (
        _weights("resnet18", "resnet18-f37072fd.pth"),
        _weights("resnet34", "resnet34-b627a593.pth"),
        _weights("resnet50", "resnet50-0676ba61.pth"),
    )
}
CATALOG = DATA_SETS | WEIGHTS
