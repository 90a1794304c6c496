import numpy as np

from baton import Run

fit = np.genfromtxt("fit.csv", delimiter=",", names=True)
run = Run("runs/classifier")
for of, rows in (("", run.history()), ("val_", run.evaluations())):
    for name in ("loss", "accuracy"):
        theirs, ours = fit[of + name], np.array([row[name] for row in rows])
        print(f"{of + name:12}  {len(ours)} epochs, largest difference {abs(theirs - ours).max():.0e}")
