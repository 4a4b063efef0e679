//! Full checkpoints of a learner, in Burn's file formats.
//!
//! Burn saves and loads on its own threads, which are not ranks: it would read one rank's shards while the rank continues,
//! and load a model that belongs to no rank. Therefore everything here runs on the rank's thread, on all ranks: rank 0
//! decides and writes, and the others take part in reading sharded tensors.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use burn::module::Module;
use burn::record::{FileRecorder, FullPrecisionSettings, Record};
use burn::tensor::Device;
use burn::tensor::backend::Backend;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy, FileCheckpointer,
    KeepLastNCheckpoints,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    Learner, LearnerModelRecord, LearnerOptimizerRecord, LearnerSchedulerRecord, LearningCheckpointer,
    LearningComponentsTypes, TrainingBackend,
};
use zero_burn::load_state;

use super::Ranks;

type File<R, LC> = Box<dyn Checkpointer<R, TrainingBackend<LC>>>;

/// The files of checkpoints, and the strategy that decides when to save them.
pub(super) struct Checkpoints<LC: LearningComponentsTypes> {
    model: File<LearnerModelRecord<LC>, LC>,
    optimizer: File<LearnerOptimizerRecord<LC>, LC>,
    scheduler: File<LearnerSchedulerRecord<LC>, LC>,
    strategy: Mutex<Box<dyn CheckpointingStrategy>>,
}

impl<LC: LearningComponentsTypes + 'static> Checkpoints<LC> {
    pub(super) fn new<FR: FileRecorder<LC::Backend> + 'static>(directory: &Path, recorder: FR) -> Self {
        Self {
            model: Box::new(FileCheckpointer::new(recorder.clone(), directory, "model")),
            optimizer: Box::new(FileCheckpointer::new(recorder.clone(), directory, "optim")),
            scheduler: Box::new(FileCheckpointer::new(recorder, directory, "scheduler")),
            strategy: Mutex::new(Box::new(KeepLastNCheckpoints::new(2))),
        }
    }

    pub(super) fn set_strategy(&self, strategy: Box<dyn CheckpointingStrategy>) {
        *self.strategy() = strategy;
    }

    fn strategy(&self) -> MutexGuard<'_, Box<dyn CheckpointingStrategy>> {
        self.strategy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Saves and deletes as the strategy on rank 0 decides. A collective operation.
    pub(super) fn after_epoch(&self, learner: &Learner<LC>, epoch: usize, store: &EventStoreClient, ranks: &Ranks) {
        let mut actions = Vec::new();
        let save = ranks.decide(|| {
            actions = self.strategy().checkpointing(epoch, store);
            actions.contains(&CheckpointingAction::Save)
        });
        if save {
            self.save(learner, epoch, store, ranks);
        }
        for action in actions {
            if let CheckpointingAction::Delete(old) = action {
                let deleted = self.model.delete(old).and(self.optimizer.delete(old)).and(self.scheduler.delete(old));
                deleted.unwrap_or_else(|error| {
                    ranks.stop(format!("cannot delete the checkpoint of epoch {old}: {error}"))
                });
            }
        }
        // No rank goes on, to update what is read here or to list the files, before rank 0 is done.
        ranks.all_gather(&[0.0]);
    }

    fn save(&self, learner: &Learner<LC>, epoch: usize, store: &EventStoreClient, ranks: &Ranks) {
        let (optimizer, scheduler) = records(learner, epoch, store, ranks);
        let model = learner.model().into_record();
        if ranks.rank() == 0 {
            let saved = self.model.save(epoch, model).and_then(|()| self.optimizer.save(epoch, optimizer));
            saved
                .and_then(|()| self.scheduler.save(epoch, scheduler))
                .unwrap_or_else(|error| ranks.stop(format!("cannot save a checkpoint of epoch {epoch}: {error}")));
        } else {
            // Parameters are read without the other ranks' help; their owners wait in `after_epoch` until they have been.
            drop(Record::<LC::Backend>::into_item::<FullPrecisionSettings>(optimizer));
        }
    }

    /// Loads the checkpoint saved after `epoch`. Every rank reads the files and keeps its shards.
    pub(super) fn restore(
        &self,
        learner: &mut Learner<LC>,
        epoch: usize,
        device: &Device<TrainingBackend<LC>>,
        ranks: &Ranks,
    ) {
        let failed = |what: &str, error: CheckpointerError| -> ! {
            ranks.stop(format!("cannot load the {what} of the checkpoint of epoch {epoch}: {error}"))
        };
        learner.load_model(self.model.restore(epoch, device).unwrap_or_else(|error| failed("model", error)));
        let optimizer = load_state(|| self.optimizer.restore(epoch, device));
        learner.load_optim(optimizer.unwrap_or_else(|error| failed("optimizer", error)));
        learner
            .load_scheduler(self.scheduler.restore(epoch, device).unwrap_or_else(|error| failed("scheduler", error)));
    }
}

/// Returns the records of the learner's optimizer and scheduler, which only a checkpointer can get.
fn records<LC: LearningComponentsTypes + 'static>(
    learner: &Learner<LC>,
    epoch: usize,
    store: &EventStoreClient,
    ranks: &Ranks,
) -> (LearnerOptimizerRecord<LC>, LearnerSchedulerRecord<LC>) {
    struct Always;
    impl CheckpointingStrategy for Always {
        fn checkpointing(&mut self, _epoch: usize, _store: &EventStoreClient) -> Vec<CheckpointingAction> {
            vec![CheckpointingAction::Save]
        }
    }
    // The model is to be had from the learner.
    let (model, _) = catcher();
    let (optimizer, caught_optimizer) = catcher();
    let (scheduler, caught_scheduler) = catcher();
    // The checkpointers' threads pass the records on, without touching a tensor, and are joined when these are dropped.
    let mut catchers = LearningCheckpointer::<LC>::new(model, optimizer, scheduler, Box::new(Always));
    catchers.checkpoint(learner, epoch, store);
    drop(catchers);
    match (caught_optimizer.recv(), caught_scheduler.recv()) {
        (Ok(optimizer), Ok(scheduler)) => (optimizer, scheduler),
        _ => ranks.stop("a checkpointer's thread ended without the records"),
    }
}

/// Returns a checkpointer that sends records to the receiver.
fn catcher<R: Record<B> + 'static, B: Backend>() -> (AsyncCheckpointer<R, B>, mpsc::Receiver<R>) {
    struct Catcher<R>(mpsc::Sender<R>);
    impl<R: Record<B>, B: Backend> Checkpointer<R, B> for Catcher<R> {
        fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
            // Without a receiver, nobody wants the record.
            let _ = self.0.send(record);
            Ok(())
        }

        fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
            Ok(())
        }

        fn restore(&self, _epoch: usize, _device: &B::Device) -> Result<R, CheckpointerError> {
            Err(CheckpointerError::Unknown("this checkpointer stores nothing".into()))
        }
    }
    let (sender, receiver) = mpsc::channel();
    (AsyncCheckpointer::new(Catcher(sender)), receiver)
}
