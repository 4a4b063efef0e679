//! Activation checkpointing: tensors computed in a block are dropped after it, and recomputed when the backward pass needs them (Chen et
//! al. 2016, <https://arxiv.org/abs/1604.06174>).
//!
//! Within a block, each operation that computes ordinary float tensors from others is recorded, and its results are handles. Autodiff saves
//! handles like tensors. After the block their contents are dropped. Loading a dropped one reruns the recorded operations, but only those
//! that something still held needs, on the inputs of the block: parameters are gathered again, and random numbers are the same as before.
//! The graph is not aware of it, so no backward pass runs within another, and the load need not be part of a backward pass. (ADR 21)
//!
//! Tensors that are not recorded (integers, masks, rare operations) stay in memory, and are inputs of the block where they are used. A
//! tensor that one block has computed and another has used may be kept outside of memory until it is needed again
//! (`zero_engine::activations`).

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use parking_lot::Mutex;

use zero_engine::activations::{Movable, Offloader};

use crate::engine::Inner;

type Float<B> = <B as burn_backend::BackendTypes>::FloatTensorPrimitive;

/// The operands of a running operation, in order.
pub(crate) type Operands<B> = std::vec::IntoIter<Float<B>>;

/// Function that computes all float results of an operation from its float operands; it owns everything else.
type Run<B> = Box<dyn Fn(&mut Operands<B>) -> Vec<Float<B>> + Send>;

/// A float tensor that was computed within a block.
#[derive(Clone)]
pub struct Activation<B: Backend>(Arc<Slot<B>>);

struct Slot<B: Backend> {
    block: Arc<Block<B>>,
    /// Index among the tensors of the block.
    index: usize,
    shape: Shape,
    dtype: DType,
    device: B::Device,
    content: Arc<Movable<Inner<B>>>,
}

struct Block<B: Backend> {
    log: Mutex<Log<B>>,
    /// Moves the block's inputs out of memory, if configured.
    offloader: Option<Arc<Offloader<Inner<B>>>>,
}

/// The operations of a block, in order.
struct Log<B: Backend> {
    operations: Vec<Operation<B>>,
    made: Vec<Weak<Slot<B>>>,
    /// Tensors of other blocks that this one reads.
    inputs: Vec<Weak<Slot<B>>>,
}

struct Operation<B: Backend> {
    inputs: Vec<Input<B>>,
    made: Range<usize>,
    run: Run<B>,
}

/// The source of an operand.
enum Input<B: Backend> {
    Made(usize),
    /// Loads a tensor that existed before the block, or is not recorded.
    Outside(Box<dyn Fn() -> Float<B> + Send>),
}

thread_local! {
    /// The block whose operations this thread records.
    static RECORDING: RefCell<Option<Arc<dyn Any + Send + Sync>>> = const { RefCell::new(None) };
}

fn recording<B: Backend>() -> Option<Arc<Block<B>>> {
    RECORDING.with_borrow(|recording| recording.clone()?.downcast().ok())
}

/// Returns whether this thread is within a block.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// Begins a block on this thread.
pub(crate) fn begin<B: Backend>(offloader: Option<Arc<Offloader<Inner<B>>>>) {
    let log = Mutex::new(Log::<B> { operations: Vec::new(), made: Vec::new(), inputs: Vec::new() });
    RECORDING.set(Some(Arc::new(Block { log, offloader })));
}

/// Ends the block: drops its tensors except `outputs`, and moves its inputs out of memory if configured.
pub(crate) fn end<B: Backend>(outputs: &[Activation<B>]) {
    let Some(block) = recording::<B>() else { return };
    RECORDING.set(None);
    // Taken out first: dropping a tensor may need the lock.
    let (made, inputs) = {
        let mut log = block.log.lock();
        let made: Vec<_> = log.made.iter().filter_map(Weak::upgrade).collect();
        (made, std::mem::take(&mut log.inputs))
    };
    let is_output = |slot: &Arc<Slot<B>>| outputs.iter().any(|output| Arc::ptr_eq(&output.0, slot));
    made.iter().filter(|slot| !is_output(slot)).for_each(|slot| slot.content.drop_tensor());
    for slot in inputs.iter().filter_map(Weak::upgrade) {
        if let Some(offloader) = &block.offloader {
            offloader.move_out(&slot.content);
        }
    }
}

impl<B: Backend> Slot<B> {
    fn is_gone(&self) -> bool {
        self.content.is_gone()
    }

    /// Returns the tensor, which must be available, without keeping a handle if `is_last`.
    fn tensor(&self, is_last: bool) -> Float<B> {
        self.content.tensor(self.block.offloader.as_deref(), is_last)
    }
}

impl<B: Backend> Activation<B> {
    /// Returns the tensor, recomputed if necessary. Without other handles on it, the backend may compute in place.
    pub(crate) fn load(self) -> Float<B> {
        if self.0.is_gone() {
            self.0.block.replay();
        }
        self.take()
    }

    fn take(self) -> Float<B> {
        // Blocks hold only weak handles, which can be upgraded only while a strong one is held.
        self.0.tensor(Arc::strong_count(&self.0) == 1)
    }

    pub(crate) fn device(&self) -> &B::Device {
        &self.0.device
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.0.shape
    }

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype
    }
}

impl<B: Backend> fmt::Debug for Activation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_dropped = self.0.is_gone();
        f.debug_struct("Activation")
            .field("shape", &self.0.shape)
            .field("is_dropped", &is_dropped)
            .finish_non_exhaustive()
    }
}

/// An operation in progress within a block.
pub(crate) struct Recording<B: Backend> {
    block: Arc<Block<B>>,
    inputs: Vec<Input<B>>,
    operands: Vec<Float<B>>,
}

impl<B: Backend> Recording<B> {
    /// Begins the next operation of this thread, if it is within a block.
    pub(crate) fn begin() -> Option<Self> {
        let block = recording()?;
        Some(Self { block, inputs: Vec::new(), operands: Vec::new() })
    }

    /// Adds an operand that the block has computed; returns one of another block as an error.
    pub(crate) fn made(&mut self, activation: Activation<B>) -> Result<(), Activation<B>> {
        if !Arc::ptr_eq(&self.block, &activation.0.block) {
            let slot = Arc::downgrade(&activation.0);
            let inputs = &mut self.block.log.lock().inputs;
            if !inputs.iter().any(|input| input.ptr_eq(&slot)) {
                inputs.push(slot);
            }
            return Err(activation);
        }
        self.inputs.push(Input::Made(activation.0.index));
        self.operands.push(activation.take());
        Ok(())
    }

    /// Adds an operand that `load` returns, now and on a rerun.
    pub(crate) fn outside(&mut self, load: impl Fn() -> Float<B> + Send + 'static) {
        self.operands.push(load());
        self.inputs.push(Input::Outside(Box::new(load)));
    }

    pub(crate) fn operands(&mut self) -> Operands<B> {
        std::mem::take(&mut self.operands).into_iter()
    }

    /// Ends the operation: returns handles of its results `floats`, and keeps `run`.
    pub(crate) fn end(self, floats: Vec<Float<B>>, run: Run<B>) -> std::vec::IntoIter<Activation<B>> {
        let Self { block, inputs, .. } = self;
        let mut log = block.log.lock();
        let first = log.made.len();
        let slot = |(i, content): (usize, Float<B>)| {
            let (shape, dtype, device) = (content.shape(), content.dtype(), B::float_device(&content));
            let content = Movable::new(content, shape.as_slice());
            Activation(Arc::new(Slot { block: block.clone(), index: first + i, shape, dtype, device, content }))
        };
        let made: Vec<_> = floats.into_iter().enumerate().map(slot).collect();
        log.made.extend(made.iter().map(|activation| Arc::downgrade(&activation.0)));
        log.operations.push(Operation { inputs, made: first..first + made.len(), run });
        made.into_iter()
    }
}

impl<B: Backend> Block<B> {
    /// Recomputes all dropped tensors that something still holds.
    fn replay(&self) {
        let _span = tracing::trace_span!("recompute a block").entered();
        let log = self.log.lock();
        let held: Vec<Option<Arc<Slot<B>>>> = log.made.iter().map(Weak::upgrade).collect();
        let is_gone = |slot: &Option<Arc<Slot<B>>>| slot.as_ref().is_some_and(|slot| slot.is_gone());
        // Which operations must run, which tensors they must recompute, and how often they read each tensor.
        let mut wanted: Vec<bool> = held.iter().map(is_gone).collect();
        let mut readers = vec![0; held.len()];
        let mut runs = vec![false; log.operations.len()];
        for (operation, runs) in log.operations.iter().zip(&mut runs).rev() {
            *runs = operation.made.clone().any(|index| wanted[index]);
            for input in operation.inputs.iter().filter(|_| *runs) {
                if let Input::Made(index) = *input {
                    readers[index] += 1;
                    wanted[index] |= held[index].as_ref().is_none_or(|slot| slot.is_gone());
                }
            }
        }
        let mut values: Vec<Option<Float<B>>> = held.iter().map(|_| None).collect();
        for operation in log.operations.iter().zip(runs).filter_map(|(operation, runs)| runs.then_some(operation)) {
            let operand = |input: &Input<B>| match input {
                Input::Outside(load) => load(),
                Input::Made(index) => {
                    readers[*index] -= 1;
                    let value = if readers[*index] == 0 { values[*index].take() } else { values[*index].clone() };
                    value.unwrap_or_else(|| {
                        let slot = held[*index].as_ref().expect("a tensor that nothing holds is recomputed");
                        slot.tensor(false)
                    })
                }
            };
            let operands: Vec<_> = operation.inputs.iter().map(operand).collect();
            let made = (operation.run)(&mut operands.into_iter());
            for (index, value) in operation.made.clone().zip(made) {
                if let Some(slot) = held[index].as_ref().filter(|_| wanted[index]) {
                    slot.content.refill(value.clone());
                }
                if readers[index] > 0 {
                    values[index] = Some(value);
                }
            }
        }
    }
}
