// The look-up of choices in a cache of experts (slot_cache.h), by one block of threads, or on the host by one thread (or
// several, in a test): `Block` says which.
//
//   thread(), threads()      which thread this is, of how many
//   sync()                   all threads get here before any goes on, and see what others have written
//   load(p)                  *p of a choice, which another block may have written
//   mark(word, bits)         ors into a word that others are marking
//   oldest(stamp)            the smallest stamp of all threads, in every thread; a sync() in itself
//   add(counter, n)          to a counter that others are adding to
#pragma once

#include "ops/slot_few.h"
#include "ops/slot_many.h"

namespace rocket {

// One look-up of the choices id[n] (-1 is skipped) in a layer, by all threads of the block; the last writes are not yet
// behind a barrier when it returns.
template <typename Block>
ROCKET_HOST_DEVICE void slot_lookup(const SlotCache& c, int32_t layer, const int32_t* id, int64_t n,
                                    SlotScratch& s, Block& block) {
  const int64_t now = *c.clock, retired = *c.retired;  // written later, behind barriers
  const bool hints = *c.hints != 0;
  slots::find_chosen(c, layer, id, n, s, block);
  if (n > c.few) {
    slots::look_up_many(c, layer, id, n, now, retired, hints, s, block);
  } else {
    slots::look_up_few(c, layer, id, n, now, hints, s, block);
  }
}

}  // namespace rocket
