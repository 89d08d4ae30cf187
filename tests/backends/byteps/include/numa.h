/* Stand-in for libnuma's header: what BytePS 0.2.5 calls, answered in hostcuda.c for a machine with one node. */
#ifndef DPRO_TEST_BED_NUMA_H
#define DPRO_TEST_BED_NUMA_H
#ifdef __cplusplus
extern "C" {
#endif
extern void *numa_all_nodes_ptr, *numa_no_nodes_ptr;
int numa_max_node(void);
void* numa_parse_nodestring(const char* text);
void numa_bind(void* nodes);
void numa_set_preferred(int node);
void numa_set_interleave_mask(void* nodes);
#ifdef __cplusplus
}
#endif
#endif
