"""Training: prepare the data, run the training loop, save and average checkpoints, score the result.

    run                                one run from recipe to card
    resume                             open a run folder, or resume the run in it
    prepare_data, prepare_data_shards  tokenize the corpus once, in one process or many
    data_loader                        the batches of each epoch
    trainer, train_step                the training loop; one optimizer step
    out_of_memory                      split batches into micro-batches
    optimizers                         Adam, Muon, SGD …; learning rate schedules: noam, cosine, constant
    checkpoint, stopping               save, resume, average; when training stops
    distributed, sharding              several processes: data parallelism, FSDP
    sharded_checkpoint, run_mirror     checkpoints in parts; copies of the run on machines that do not share a folder
    cpu_kernels, cuda_graph            a step with native kernels on a CPU, or as one CUDA graph
    fine_tuning, distillation          start from another run; learn from a teacher
    autoconfig, planner                choose a recipe for data, device and time; fit the steps to the time
    cost_model                         measure the speed of this device; predict that of others
    progress, evaluation               what is reported during training; validation, summary, forgetting
    model_card                         after training: average, score, write the card

The others compare and check: ``train_test_overlap``, ``compare_runs``, ``pair_scoring``.
"""
