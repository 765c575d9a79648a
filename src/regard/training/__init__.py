"""Training: prepare the data, run the training loop, save and average checkpoints, score the result.

    run                                one run from recipe to card
    resume                             open a run folder, or resume the run in it
    prepare_data, prepare_data_shards  tokenize the corpus once, in one process or many
    data_loader                        the batches of each epoch
    trainer, train_step                the training loop; one optimizer step, in micro-batches if need be
    optimizers_and_schedules           Adam, SGD …; noam, cosine, constant
    checkpoint, stopping               save, resume, average; when training stops
    distributed, sharding              several processes: data parallelism, FSDP
    cpu_kernels                        native kernels of packed batches
    fine_tuning, distillation          start from another run; learn from a teacher
    autoconfig, device_speed           choose a recipe, for the speed of the device
    planner, cost_model                fit the time; estimate other machines
    progress, evaluation               what is reported during training; validation, scores and the summary
    model_card                         after training: average, score, write the card

The others compare and check: ``train_test_overlap``, ``forgetting``, ``compare_runs``, ``pair_scoring``.
"""
