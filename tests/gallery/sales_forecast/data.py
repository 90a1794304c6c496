"""A PyDataset of windows of daily sales, in the order of time."""

import keras
import numpy as np


class Windows(keras.utils.PyDataset):
    def __init__(self, past=14, batch=20, days=214):
        super().__init__()
        draw = np.random.default_rng(16)
        time = np.arange(days)
        self.sales = np.sin(2 * np.pi * time / 7) + 0.01 * time + 0.1 * draw.normal(size=days)
        self.past, self.batch = past, batch

    def __len__(self):
        return (len(self.sales) - self.past) // self.batch

    def __getitem__(self, index):
        begins = np.arange(index * self.batch, (index + 1) * self.batch)
        windows = np.stack([self.sales[begin : begin + self.past] for begin in begins])
        return windows.astype("float32"), self.sales[begins + self.past, None].astype("float32")


def load():
    return Windows()
