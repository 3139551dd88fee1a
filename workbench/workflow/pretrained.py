"""`make pretrained`: features and weights of the settings with a pre-trained encoder, made once."""

from stamp_core.config.params import read_params, read_setting
from stamp_core.data.loading import find_source, load_dataset
from workbench.efficientnet import save_last_block


def prepare() -> None:
    """Write the weights from which last blocks start, and encode the images of all settings."""
    params = read_params()
    settings = [read_setting(name, params) for name in params["settings"]]
    for setting in (each for each in settings if each.data["source"] == "features"):
        if setting.network.kind == "last_block":
            print(save_last_block(find_source(setting.data)[1].encoder))
        print(f"{setting.name}: {load_dataset(setting.data)}", flush=True)


if __name__ == "__main__":
    prepare()
