//! Exchange of weights with their moving averages, to evaluate, predict and export with the averages.

use std::convert::Infallible;

use burn::module::AutodiffModule;
use zero_core::checkpoint::ElementType;

use super::fused::{Fused, loaded_state};
use crate::abort::stop;
use crate::autodiff::ZeroAutodiff;
use crate::context::Context;
use crate::engine::burn_shape;
use crate::shards::replace_shards;
use crate::tensor::ZeroTensor;
use crate::values::read;
use zero_engine::update::plan::{EMA, MASTER, edited};

impl<A: ZeroAutodiff> Fused<A> {
    /// Exchanges the parameters of `module`, and their masters, with their moving averages; a second call exchanges them back, bit by bit.
    /// A parameter without an average, because it is frozen or has not been updated, stays. Every rank calls it. Between the two calls the
    /// module may be read and saved as usual, but must not be trained.
    ///
    /// Memory: two copies of one shard at a time.
    pub fn swap_averages<M: AutodiffModule<A>>(&mut self, module: M) -> M {
        let context = Context::<A::Base>::current();
        context.wait_for_updates();
        let (module, exchanged) = replace_shards::<A, M, Infallible>(module, |meta, parameter, range| {
            let Some(&place) = self.index.get(&meta.id) else { return Ok(None) };
            let cells = &mut self.states[place].1.cells;
            let named = |name: &str| cells.iter().position(|(known, _)| known == name);
            let Some(average) = named(EMA) else { return Ok(None) };
            let master = named(MASTER);
            let ZeroTensor::Shard(shard) = parameter else {
                stop(format!("parameter {} is an ordinary tensor: call zero_burn::module::prepare", meta.path));
            };
            if let Some((master, edits)) = master.zip(shard.clone().into_operand().edits) {
                // The parameter was changed since its last update, so apply the change to its master.
                cells[master].1 = edited(cells[master].1.clone(), &edits);
            }
            let cell = cells[average].1.clone();
            let local = |x| read::<A::Base>(x).iter::<f32>().take(range.len()).collect::<Vec<f32>>();
            let values = local(cell.local());
            cells[average].1 = match master {
                Some(master) => std::mem::replace(&mut cells[master].1, cell),
                None => loaded_state(meta.id, EMA, burn_shape(&cell.shape), local(shard.into_piece())),
            };
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Ok(Some((ElementType::F32, bytes)))
        });
        let Ok(()) = exchanged;
        module
    }
}
