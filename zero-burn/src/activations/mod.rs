//! Activation checkpointing: tensors made in a block are dropped behind it, and made again when the backward pass asks for
//! them (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>).
//!
//! Within a block each operation that makes ordinary float tensors of others is recorded, and what it makes is a handle. Autodiff
//! saves handles as it saves tensors. Behind the block their contents go; who loads one that is gone runs the recorded operations
//! again, those alone that something still held needs, on what came into the block: parameters are gathered anew, random numbers are
//! those of the first time. The graph knows nothing of it, so no backward pass runs within another, and what asks need not be
//! a backward pass. (ADR 21)
//!
//! What is not recorded (integers, masks, rare operations) stays in memory as it is, and comes into the block where it is used. What
//! one block has made and another has used may be elsewhere than in memory until it is needed again ([`offload`]).

mod offload;

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

use burn_backend::{Backend, TensorMetadata};
use burn_std::{DType, Shape};
use parking_lot::Mutex;

use offload::Content;
pub(crate) use offload::Offloader;

type Float<B> = <B as burn_backend::BackendTypes>::FloatTensorPrimitive;

/// The operands of an operation that runs, in its order.
pub(crate) type Operands<B> = std::vec::IntoIter<Float<B>>;

/// Makes all float results of an operation of its float operands; all else it owns.
type Run<B> = Box<dyn Fn(&mut Operands<B>) -> Vec<Float<B>> + Send>;

/// A float tensor that was made within a block.
#[derive(Clone)]
pub struct Activation<B: Backend>(Arc<Slot<B>>);

struct Slot<B: Backend> {
    block: Arc<Block<B>>,
    /// Its number among those of the block.
    index: usize,
    shape: Shape,
    dtype: DType,
    device: B::Device,
    content: Arc<Mutex<Content<B>>>,
}

struct Block<B: Backend> {
    log: Mutex<Log<B>>,
    /// What moves its inputs out of memory, if something does.
    offloader: Option<Arc<Offloader<B>>>,
}

/// The operations of a block, in their order.
struct Log<B: Backend> {
    operations: Vec<Operation<B>>,
    made: Vec<Weak<Slot<B>>>,
    /// What other blocks have made and this one reads.
    inputs: Vec<Weak<Slot<B>>>,
}

struct Operation<B: Backend> {
    inputs: Vec<Input<B>>,
    made: Range<usize>,
    run: Run<B>,
}

/// Where an operand comes from.
enum Input<B: Backend> {
    Made(usize),
    /// Loads what was there before the block, or is not recorded.
    Outside(Box<dyn Fn() -> Float<B> + Send>),
}

thread_local! {
    /// The block whose operations this thread records.
    static RECORDING: RefCell<Option<Arc<dyn Any + Send + Sync>>> = const { RefCell::new(None) };
}

fn recording<B: Backend>() -> Option<Arc<Block<B>>> {
    RECORDING.with_borrow(|recording| recording.clone()?.downcast().ok())
}

/// Whether this thread is within a block.
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// A block begins on this thread.
pub(crate) fn begin<B: Backend>(offloader: Option<Arc<Offloader<B>>>) {
    let log = Mutex::new(Log::<B> { operations: Vec::new(), made: Vec::new(), inputs: Vec::new() });
    RECORDING.set(Some(Arc::new(Block { log, offloader })));
}

/// The block ends: what was made in it is dropped, but for `outputs`, and its inputs are moved out if that is asked for.
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
    made.iter().filter(|slot| !is_output(slot)).for_each(|slot| *slot.content.lock() = Content::Gone);
    for slot in inputs.iter().filter_map(Weak::upgrade) {
        if let Some(offloader) = &block.offloader {
            offloader.move_out(&slot.content, &slot.shape, slot.dtype, &slot.device);
        }
    }
}

impl<B: Backend> Slot<B> {
    fn is_gone(&self) -> bool {
        matches!(*self.content.lock(), Content::Gone)
    }

    /// The tensor, which is not gone; without leaving a handle if `is_last`.
    fn tensor(&self, is_last: bool) -> Float<B> {
        let mut content = self.content.lock();
        if let (Content::Leaving(_) | Content::Stored(_) | Content::Back(_), Some(offloader)) =
            (&*content, &self.block.offloader)
        {
            offloader.is_loaded(&self.content);
            if let Content::Stored(stored) = &*content {
                *content = Content::Back(offloader.fetch(stored, &self.shape, self.dtype, &self.device));
            }
        }
        content.tensor(is_last).expect("a replay makes what is held")
    }
}

impl<B: Backend> Activation<B> {
    /// The tensor, made again if it has to be. Without other handles on it, the backend may compute in place.
    pub(crate) fn load(self) -> Float<B> {
        if self.0.is_gone() {
            self.0.block.replay();
        }
        self.take()
    }

    fn take(self) -> Float<B> {
        // Blocks hold no handles but weak ones, from which others come only while one is held.
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

/// An operation under way within a block.
pub(crate) struct Recording<B: Backend> {
    block: Arc<Block<B>>,
    inputs: Vec<Input<B>>,
    operands: Vec<Float<B>>,
}

impl<B: Backend> Recording<B> {
    /// The next operation of this thread, if it is within a block.
    pub(crate) fn begin() -> Option<Self> {
        let block = recording()?;
        Some(Self { block, inputs: Vec::new(), operands: Vec::new() })
    }

    /// The next operand is one that the block has made; one of another block is given back.
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

    /// The next operand is one that `load` gives, now and later.
    pub(crate) fn outside(&mut self, load: impl Fn() -> Float<B> + Send + 'static) {
        self.operands.push(load());
        self.inputs.push(Input::Outside(Box::new(load)));
    }

    pub(crate) fn operands(&mut self) -> Operands<B> {
        std::mem::take(&mut self.operands).into_iter()
    }

    /// What `run` has made of the operands, as handles; `run` is kept.
    pub(crate) fn end(self, floats: Vec<Float<B>>, run: Run<B>) -> std::vec::IntoIter<Activation<B>> {
        let Self { block, inputs, .. } = self;
        let mut log = block.log.lock();
        let first = log.made.len();
        let slot = |(i, content): (usize, Float<B>)| {
            let (shape, dtype, device) = (content.shape(), content.dtype(), B::float_device(&content));
            let content = Arc::new(Mutex::new(Content::Here(content)));
            Activation(Arc::new(Slot { block: block.clone(), index: first + i, shape, dtype, device, content }))
        };
        let made: Vec<_> = floats.into_iter().enumerate().map(slot).collect();
        log.made.extend(made.iter().map(|activation| Arc::downgrade(&activation.0)));
        log.operations.push(Operation { inputs, made: first..first + made.len(), run });
        made.into_iter()
    }
}

impl<B: Backend> Block<B> {
    /// Makes again what is held and gone.
    fn replay(&self) {
        let _span = tracing::trace_span!("compute a block again").entered();
        let log = self.log.lock();
        let held: Vec<Option<Arc<Slot<B>>>> = log.made.iter().map(Weak::upgrade).collect();
        let is_gone = |slot: &Option<Arc<Slot<B>>>| slot.as_ref().is_some_and(|slot| slot.is_gone());
        // How often each is read by what has to run: nothing, if it is neither gone nor read.
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
                        let slot = held[*index].as_ref().expect("what nobody holds is made again");
                        slot.tensor(false)
                    })
                }
            };
            let operands: Vec<_> = operation.inputs.iter().map(operand).collect();
            let made = (operation.run)(&mut operands.into_iter());
            for (index, value) in operation.made.clone().zip(made) {
                if let Some(slot) = held[index].as_ref().filter(|_| wanted[index]) {
                    let mut content = slot.content.lock();
                    if let Content::Gone = *content {
                        *content = Content::Here(value.clone());
                    }
                }
                if readers[index] > 0 {
                    values[index] = Some(value);
                }
            }
        }
    }
}
