/* For .ci/tsan: tells the thread sanitizer what the standard library orders. The one that comes with
 * rustc isn't instrumented: atomics and free locks are inlined into code that is, but a lock that
 * was waited for, a condition, a cell initialised once or a scope's end would not be seen, and what
 * they order would be told as races. The linker puts these functions in front of the library's
 * (--wrap), under their mangled names. */
#include <stdbool.h>
#include <stddef.h>

void __tsan_acquire(void *address);
void __tsan_release(void *address);

/* Mutex::lock_contended(&self) */
void real_lock(void *mutex) __asm__("__real_" LOCK);
void lock(void *mutex) __asm__("__wrap_" LOCK);
void lock(void *mutex) {
    real_lock(mutex);
    __tsan_acquire(mutex);
}

/* Condvar::wait(&self, mutex: &Mutex) */
void real_wait(void *condition, void *mutex) __asm__("__real_" WAIT);
void wait_for(void *condition, void *mutex) __asm__("__wrap_" WAIT);
void wait_for(void *condition, void *mutex) {
    __tsan_release(mutex);
    real_wait(condition, mutex);
    __tsan_acquire(mutex);
}

/* Once::call(&self, ignore_poisoning: bool, work: &mut dyn FnMut) */
void real_once(void *once, bool ignore, void *work, void *vtable) __asm__("__real_" ONCE);
void call_once(void *once, bool ignore, void *work, void *vtable) __asm__("__wrap_" ONCE);
void call_once(void *once, bool ignore, void *work, void *vtable) {
    real_once(once, ignore, work, vtable);
    __tsan_acquire(once);
    __tsan_release(once);
}

/* ScopeData::decrement_num_running_threads(&self, panicked: bool). The count is one of the first
 * two words. */
void real_end(void *scope, bool panicked) __asm__("__real_" END);
void end_of_thread(void *scope, bool panicked) __asm__("__wrap_" END);
void end_of_thread(void *scope, bool panicked) {
    __tsan_release(scope);
    __tsan_release((char *)scope + sizeof(size_t));
    real_end(scope, panicked);
}
