//! The device of [`Zero`](crate::Zero): the inner device and the rank's place.

use burn_backend::{DeviceId, DeviceOps};
use burn_std::device::Device;

use crate::current;

/// Bits of a [`DeviceId`]'s index that carry the inner device's index; the rank stands above them.
const INNER_BITS: u16 = 8;

/// An inner device as one rank sees it.
///
/// `Default` is the rank of the current thread (rank 0 outside of a launch) on the inner device that its launch has given
/// it (the default one outside), so that a program written for one device runs unchanged.
#[derive(Clone, Debug)]
pub struct ZeroDevice<D> {
    inner: D,
    rank: usize,
    /// Which rank of which launch, for threads that are not the rank's own; 0 outside of a launch.
    place: u64,
}

/// Launches follow one another on the same devices.
impl<D: PartialEq> PartialEq for ZeroDevice<D> {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner && self.rank == other.rank
    }
}

impl<D: Eq> Eq for ZeroDevice<D> {}

impl<D> ZeroDevice<D> {
    /// `inner` as the current thread's rank sees it.
    pub fn here(inner: D) -> Self {
        let (rank, place) = current::current_place();
        Self { inner, rank, place }
    }

    pub(crate) fn place(&self) -> u64 {
        self.place
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
        Self::here(current::current_device().unwrap_or_default())
    }
}

impl<D: DeviceOps> Device for ZeroDevice<D> {
    fn from_id(id: DeviceId) -> Self {
        let inner = D::from_id(DeviceId { type_id: id.type_id, index_id: id.index_id & ((1 << INNER_BITS) - 1) });
        Self { inner, rank: usize::from(id.index_id >> INNER_BITS), place: 0 }
    }

    fn to_id(&self) -> DeviceId {
        let DeviceId { type_id, index_id } = self.inner.to_id();
        // An identity for Burn's table of default types, which are the same on every rank: that ranks above 255 share
        // numbers harms nothing.
        DeviceId { type_id, index_id: index_id | ((self.rank as u16) << INNER_BITS) }
    }
}

impl<D: DeviceOps> DeviceOps for ZeroDevice<D> {}
