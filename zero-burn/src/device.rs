//! The device of [`Zero`](crate::Zero): the inner device and the rank's place.

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::context;

/// Bits of a [`DeviceId`]'s index that carry the inner device's index; the rank stands above them.
const INNER_BITS: u16 = 8;

/// An inner device as one rank sees it.
///
/// `Default` is the rank of the current thread (rank 0 outside of a launch) on the inner device that its launch has given
/// it (the default one outside), so that a program written for one device runs unchanged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ZeroDevice<D> {
    inner: D,
    rank: usize,
}

impl<D> ZeroDevice<D> {
    /// `inner` as the current thread's rank sees it.
    pub fn here(inner: D) -> Self {
        Self { inner, rank: context::current_rank() }
    }

    /// The device that the inner backend knows.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// The rank whose device this is.
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl<D: Default + Clone + 'static> Default for ZeroDevice<D> {
    fn default() -> Self {
        Self::here(context::current_device().unwrap_or_default())
    }
}

impl<D: DeviceOps> Device for ZeroDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let inner = D::from_id(DeviceId { type_id: id.type_id, index_id: id.index_id & ((1 << INNER_BITS) - 1) });
        Self { inner, rank: usize::from(id.index_id >> INNER_BITS) }
    }

    fn to_id(&self) -> DeviceId {
        let DeviceId { type_id, index_id } = self.inner.to_id();
        // An identity for Burn's table of default types, which are the same on every rank: that ranks above 255 share
        // numbers harms nothing.
        DeviceId { type_id, index_id: index_id | ((self.rank as u16) << INNER_BITS) }
    }
}

impl<D: DeviceOps> DeviceOps for ZeroDevice<D> {}
