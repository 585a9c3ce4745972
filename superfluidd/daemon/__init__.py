"""The daemon: Trio, tasks and clocks around the pure scheduler.

* :mod:`.main`: the nursery: start and stop order, in one screen.
* :mod:`.model`: one scheduler task per model: plan, tick, apply, deliver.
* :mod:`.streams`: a generation as its client sees it.
* :mod:`.watch`, :mod:`.views`: what operators see of it.
* :mod:`.service`: the facade both edges call.
* :mod:`.loading`: model files to models, before anything is bound.
* :mod:`.signals`: what a signal means.
"""
